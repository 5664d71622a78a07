"""Every kernel over the whole range of its inputs. test_interpreted.py runs it in Triton's interpreter
(TRITON_INTERPRET=1) and, where there is one, on a GPU."""

import pytest
import ranges
import torch

from oelm.speed.kernels import rotary_triton
from oelm.speed.kernels.attention_triton import INTERPRETED

if INTERPRETED:
    from interpreter import honest_interpreter  # noqa: F401  a fixture

# Lengths around the edges of tiles: the interpreter's are 16 and 32, a GPU's 32 and 64.
HERE = ranges.Where("cpu", (0, 1, 16, 17, 0, 33, 0))
CAUSAL = ranges.Where("cpu", (1, 16, 33))
if not INTERPRETED:
    HERE = ranges.Where("cuda", (0, 1, 31, 32, 33, 0, 63, 64, 65, 512, 129, 0), heads=4)
    CAUSAL = ranges.Where("cuda", (1, 32, 64, 65, 512), heads=4)
# Numpy warns of what the kernels are made to bear.
pytestmark = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value", "ignore:divide by zero")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("case", ranges.attention_cases(HERE), ids=str)
def test_attention_of_packed_texts(case):
    ranges.joint(HERE, *case, causal=False)


# The interpreter is slow: there the two that share their masks with the first are looked at in bf16 only.
SOME = [case for case in ranges.attention_cases(HERE) if not INTERPRETED or case[0] == torch.bfloat16]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_causal_attention(case):
    ranges.joint(CAUSAL, *case, causal=True)


@pytest.mark.skipif(INTERPRETED, reason="it is PyTorch's, on a GPU")
@pytest.mark.parametrize("case", ranges.attention_cases(HERE), ids=str)
def test_attention_of_one_query(case):
    ranges.one_query(HERE, *case)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_value_only_attention(case):
    ranges.value_only(HERE, *case)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("case", ranges.LOGITS, ids=str)
@pytest.mark.parametrize("dtype", HERE.dtypes, ids=str)
def test_cross_entropy(dtype, case, smoothing):
    ranges.cross_entropy(HERE, dtype, *case, smoothing)


@pytest.mark.parametrize("late", HERE.dtypes, ids=str)
@pytest.mark.parametrize("case", ranges.ROWS, ids=str)
@pytest.mark.parametrize(("slope", "count"), [(1.0, 33), (0.0, 3), (1e4, 1)])
def test_norms(late, case, slope, count):
    ranges.norm(HERE, late, *case, slope, count)


# (texts, places, heads, numbers of a head): one of each, around a program's rows, and sizes that models have
TURNED = [(1, 1, 1, 2), (2, 17, 3, 20), (3, 33, 2, 64)]
if not INTERPRETED:
    TURNED += [(64, 512, 8, 64), (2, 333, 3, 128), (1, 4700, 8, 64)]


@pytest.mark.parametrize("size", [*ranges.SIZES, 1e38, 0.0])
@pytest.mark.parametrize("shape", TURNED, ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", rotary_triton.DTYPES, ids=str)
def test_rotary_positions(dtype, packed, shape, size):
    ranges.rotary(HERE, dtype, size, shape, packed)


@pytest.mark.parametrize("size", [*ranges.SIZES, 0.0])
@pytest.mark.parametrize(("clip", "decay"), [(0.0, 0.0), (1.0, 0.1)])
def test_adamw(size, clip, decay):
    ranges.adamw(HERE, size, clip, decay)


@pytest.mark.parametrize("size", [*ranges.SIZES, 0.0])
def test_steps_without_a_gradient(size):
    ranges.coasting(HERE, size)


# (words, tokens): one, few words, few tokens, and around where tokens are sorted instead of counted
ROWS = [(1, 1), (5, 40), (300, 33), (40, 64), (40, 65), (9, 130)]
if not INTERPRETED:
    ROWS = [(1, 1), (5, 4000), (30000, 333), (13000, 4700), (13000, 8192), (13000, 8193), (50257, 65536)]


@pytest.mark.parametrize("size", ranges.SIZES)
@pytest.mark.parametrize(("words", "count"), ROWS)
def test_rows_of_words(size, words, count):
    ranges.looked_up(HERE, size, words, count)
