import pytest

from dataload.errors import ConfigError
from dataload.sources.range import RangeSource


@pytest.mark.parametrize("numbers", [range(5), range(3, 9), range(3, 20, 4), range(9, 0, -2), range(0)])
def test_records_are_the_numbers_of_a_range(numbers):
    source = RangeSource(numbers.stop, start=numbers.start, step=numbers.step)
    assert list(source) == [{"index": number} for number in numbers]
    if numbers:
        assert source.read_batch([-1, 0])["index"].tolist() == [numbers[-1], numbers[0]]


def test_a_range_that_no_memory_holds():
    source = RangeSource(2**62)
    assert (len(source), source[-1]) == (2**62, {"index": 2**62 - 1})
    assert repr(source) == "RangeSource(4611686018427387904, start=0, step=1)"
    assert source.read_batch([0], fields=[]) == {}
    with pytest.raises(ConfigError, match=r"there is no field 'indx': did you mean 'index'\? Known: index"):
        source.read_batch([0], fields=["indx"])
    with pytest.raises(ConfigError, match="step must not be 0") as caught:
        RangeSource(5, step=0)
    assert caught.value.key == "step"
