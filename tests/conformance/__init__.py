"""Kernels that nobody here wrote, run on the emulator. ``pip install -e '.[conformance]'``; see report.py."""
