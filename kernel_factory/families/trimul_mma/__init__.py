"""trimul_mma: the triangle multiplicative update as three mma.sync kernels, one source for every SM from 8.0 on."""

from kernel_factory.families.trimul_mma import plan
from kernel_factory.family import Family

FAMILY = Family(name="trimul_mma", op="triangle_multiplicative_update", package=__name__, plan=plan.plan)
