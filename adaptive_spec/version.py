"""Which version of the package this is."""

from importlib import metadata


def package_version() -> str:
    """Return the installed version, "unknown" in a bare checkout."""
    try:
        return metadata.version("adaptive-spec")
    except metadata.PackageNotFoundError:
        return "unknown"
