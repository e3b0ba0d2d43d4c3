"""The GPUs of SageMaker's instance types: a node of a type has at most so many ranks.

Source: https://aws.amazon.com/ec2/instance-types/accelerated-computing/ (the column of GPUs; ``ml.`` stands before each
name in SageMaker).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

#: The sizes of families whose sizes have equal numbers of GPUs.
_G5 = {
    "xlarge": 1,
    "2xlarge": 1,
    "4xlarge": 1,
    "8xlarge": 1,
    "16xlarge": 1,
    "12xlarge": 4,
    "24xlarge": 4,
    "48xlarge": 8,
}
_FAMILIES: Mapping[str, Mapping[str, int]] = {
    "p2": {"xlarge": 1, "8xlarge": 8, "16xlarge": 16},
    "p3": {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8},
    "p3dn": {"24xlarge": 8},
    "p4d": {"24xlarge": 8},
    "p4de": {"24xlarge": 8},
    "p5": {"4xlarge": 1, "48xlarge": 8},
    "p5e": {"48xlarge": 8},
    "p5en": {"48xlarge": 8},
    "g4dn": {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "16xlarge": 1, "12xlarge": 4},
    "g5": _G5,
    "g6": _G5,
    "g6e": _G5,
}
#: The number of GPUs by instance type.
GPUS: Mapping[str, int] = MappingProxyType(
    {
        f"ml.{family}.{size}": gpus
        for family, sizes in _FAMILIES.items()
        for size, gpus in sizes.items()
    }
)
#: The instance types by which SageMaker's estimators run on the user's own machine.
LOCAL = ("local", "local_gpu")
