"""People can leave: their rollouts become husks, the applications drop their live state."""

from tentalis.forget.core import NoSuchRequest, request_of
from tentalis.forget.process import Report, forget

__all__ = ["NoSuchRequest", "Report", "forget", "request_of"]
