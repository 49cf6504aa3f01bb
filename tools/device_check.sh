#!/usr/bin/env bash
# Install the built wheel beside nothing else and run the device check with it.
#   tools/device_check.sh OUT [options of device_check.py]
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1
shift
site=${KF_WHEEL_SITE:-build/wheel-site}
python=${PYTHON:-python3}
wheel=${KF_WHEEL:-build/wheel}
if [ ! -d "$site" ] && ! compgen -G "$wheel/kf_runtime-*.whl" >/dev/null; then
    echo "device check: expected a wheel in $wheel, or one installed in $site; found neither; run \`make wheel\`" >&2
    exit 1
fi
if [ ! -d "$site" ]; then
    "$python" -m pip install -q --no-index --no-deps --target "$site" "$wheel"/kf_runtime-*.whl
fi
PYTHONUNBUFFERED=1 PYTHONPATH="$site" exec "$python" tools/device_check.py --out "$out" "$@"
