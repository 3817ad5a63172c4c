"""One tree of errors, with numbers as attributes."""

import inspect

from brokerless.core import errors


def test_every_error_is_in_the_tree_and_in_the_picture_of_it() -> None:
    """All classes descend from the root, and the module's docstring shows each of them."""
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]
    assert len(classes) > 10
    for c in classes:
        assert issubclass(c, errors.BrokerlessError)
        assert c.__name__ in (errors.__doc__ or "")


def test_errors_carry_their_numbers() -> None:
    """Callers need not parse messages."""
    full = errors.JournalFull("p", max_bytes=1, oldest=2, wanted=3, waiting_for="g")
    assert (full.max_bytes, full.oldest, full.wanted, full.waiting_for) == (1, 2, 3, "g")
    missing = errors.NotAcknowledged(5, ["a", "b"], 1.5)
    assert missing.missing == ("a", "b")
    assert "a, b" in str(missing)
    needs = errors.MissingDependency("pynng", "nng", "NNG sockets")
    assert "pip install 'brokerless[nng]'" in str(needs)
    assert isinstance(needs, ImportError)
