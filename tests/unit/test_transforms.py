"""Which transforms get a context, and what it holds."""

import functools
import pickle

import numpy as np
import pytest

from dataload._util.randomness import derive_key
from dataload.transforms import SampleContext, compose


class Callable2:
    def __call__(self, sample, context):
        return sample, context.index


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (lambda s: s, False),
        (lambda s, context: s, True),
        (lambda s, c: s, True),
        (lambda s, scale=2: s, False),
        (lambda s, context=None: s, True),
        (lambda *a: a, False),
        (lambda s, **k: s, False),
        (Callable2(), True),
        (functools.partial(lambda a, s, c: s, 1), True),
        (functools.partial(lambda s, c: s, c=1), False),
        (dict, False),
        (np.asarray, False),
    ],
)
def test_the_context_is_given_to_those_who_ask(function, takes):
    (step,) = compose(function)
    assert step.takes_context is takes


def test_random_numbers_belong_to_seed_epoch_and_index():
    draws = {
        (seed, epoch, index): SampleContext(index, epoch, seed).generator.integers(2**63)
        for seed in range(3)
        for epoch in range(3)
        for index in range(3)
    }
    assert len(set(draws.values())) == 27
    assert SampleContext(1, 2, 0).generator.integers(2**63) == draws[0, 2, 1]
    context = SampleContext(0, 0, 0)
    assert context.generator is context.generator
    ours = SampleContext(1, 2, 3).generator
    theirs = np.random.Generator(np.random.Philox(key=derive_key(3, "transform", 2, 1, words=2)))
    copied = pickle.loads(pickle.dumps(ours))
    expected = theirs.integers(2**63, size=10).tolist()
    assert [each.integers(2**63, size=10).tolist() for each in (ours, copied)] == [expected] * 2
