"""The chunk-parallel form; for now the definition itself."""

from prism.scan.recurrent import recurrent as chunked

__all__ = ["chunked"]
