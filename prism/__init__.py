"""PRISM: Gated DeltaNet with a rank-L, input-anchored write per token, and everything needed to look
inside.
"""

from prism import attention, convert, hooks, verify
from prism.config import PrismConfig
from prism.mixer import PrismCache, PrismMixer
from prism.model import PrismModel
from prism.scan import prism_scan

__all__ = [
    "PrismCache",
    "PrismConfig",
    "PrismMixer",
    "PrismModel",
    "attention",
    "convert",
    "hooks",
    "prism_scan",
    "verify",
]
