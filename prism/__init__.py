"""PRISM and Gated DeltaNet: the scan, the layers and the model."""

from prism.scan import prism_scan

__all__ = ["prism_scan"]
