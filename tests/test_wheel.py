"""The wheel is what users get: `make check` runs this, and some of core's tests, on the built one."""

import importlib
import os
from pathlib import Path

import pytest

SITE = os.environ.get("BROKERLESS_WHEEL")
if not SITE:
    pytest.skip("`make check` sets BROKERLESS_WHEEL to the place of the built wheel", allow_module_level=True)


@pytest.mark.parametrize(
    "package",
    ["core", "direct", "multicast", "webhooks", "metrics", "spark_collector", "losstest", "console", "cli"],
)
def test_the_package_is_imported_from_the_wheel(package: str) -> None:
    """Every package, with its typing marker, is in the wheel, and this run uses that one."""
    module = importlib.import_module(f"brokerless.{package}")
    assert module.__file__ is not None
    folder = Path(module.__file__).parent
    assert folder == Path(str(SITE)).resolve() / "brokerless" / package
    assert (folder / "py.typed").exists()
