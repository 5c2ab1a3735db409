"""The version of this installation."""

from importlib.metadata import PackageNotFoundError, version


def app_version() -> str:
    """Returns the installed version, or "unknown" if the package is not installed."""
    try:
        return version("tentalis")
    except PackageNotFoundError:
        return "unknown"
