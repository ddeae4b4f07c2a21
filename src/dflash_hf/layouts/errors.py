"""Errors of drafter configurations."""


class UnknownDrafterError(ValueError):
    """A drafter whose layout, head or drafting method this package does not know."""


def require(condition: bool, must_be: str, **values) -> None:
    """
    Check a rule of the configuration: `require(theta > 0, "a positive number", rope_theta=theta)`.

    Args:
        condition (`bool`): Whether the values satisfy the rule.
        must_be (`str`): The rule; it continues the sentence "`rope_theta=-1` must be ...".
        values: The fields concerned, with their values.

    Raises:
        `ValueError`: they do not; names fields, values and rule.
    """
    if not condition:
        received = " and ".join(f"{name}={value!r}" for name, value in values.items())
        raise ValueError(f"{received} must be {must_be}; correct the drafter's configuration.")


def require_key(condition: bool, must_be: str, key: str, value) -> None:
    """[`require`] for a field whose name is in a variable, `key`."""
    require(condition, must_be, **{key: value})
