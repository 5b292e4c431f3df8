"""Loaders that stop and go on, for tests of sources and orders."""


def check_resume(make, field, step, epochs=1):
    """Check that a loader of `make` that stops after some steps goes on as one that never stopped."""

    def rest(loader):
        return [batch[field].tolist() for _ in range(epochs) for batch in loader]

    with make() as whole:
        expected = rest(whole)
    with make() as first:
        seen = [batch[field].tolist() for _, batch in zip(range(step), first, strict=False)]
        state = first.state_dict()
    with make() as second:
        second.load_state_dict(state)
        assert seen + rest(second) == expected
    return expected
