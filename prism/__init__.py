"""PRISM: Gated DeltaNet with a rank-L, input-anchored write per token, and everything needed to look
inside.
"""

from prism import attention, hooks
from prism.config import PrismConfig
from prism.mixer import PrismCache, PrismMixer
from prism.model import PrismModel
from prism.scan import prism_scan

__all__ = ["PrismCache", "PrismConfig", "PrismMixer", "PrismModel", "attention", "hooks", "prism_scan"]
