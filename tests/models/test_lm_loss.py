"""The loss in chunks is the loss: against full logits, in float64, in half precision, in a model, sharded."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import oelm
from oelm.data import load_task, prepare
from oelm.data.tasks.language_modeling import LanguageObjective
from oelm.errors import UserError
from oelm.models.create import to_gpt2
from oelm.models.lm_loss import FP16_GAIN, _losses_and_gradient, lm_loss, lm_losses
from tests.data.made import parquet, sentence

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def sample(rows=50, width=16, vocab=97, dtype=torch.float32, device="cpu", scale=0.5):
    """hidden, weight and targets, of which every seventh does not count."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator)
    weight = torch.randn(vocab, width, generator=generator) * scale
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    targets[::7] = -100
    leaves = (x.to(device, dtype).requires_grad_() for x in (hidden, weight))
    return *leaves, targets.to(device)


def plain(hidden, weight, targets, smoothing=0.0):
    logits = F.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="sum")


def chunked(hidden, weight, targets, smoothing=0.0, chunk=16):
    return lm_loss(hidden, weight, targets, chunk=chunk, label_smoothing=smoothing)


def with_gradients(loss, hidden, weight, targets, *options, factor=1.0):
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
    value = loss(hidden, weight, targets, *options)
    (value * factor).backward()
    return value.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocab", [64, 97, 128])
@pytest.mark.parametrize("chunk", [1, 16, 50, 1000])
def test_equals_cross_entropy_of_full_logits(vocab, chunk, smoothing):
    inputs = sample(vocab=vocab)
    ours = with_gradients(chunked, *inputs, smoothing, chunk, factor=3.0)
    theirs = with_gradients(plain, *inputs, smoothing, factor=3.0)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=0)
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        assert (a - b).norm() < 1e-6 * b.norm()
    hidden, weight, targets = inputs
    rows = lm_losses(hidden, weight, targets, chunk=chunk, label_smoothing=smoothing)
    expected = F.cross_entropy(F.linear(hidden, weight), targets, label_smoothing=smoothing, reduction="none")
    torch.testing.assert_close(rows, expected.detach(), rtol=1e-5, atol=1e-6)
    assert not rows.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(chunked(*inputs, smoothing, chunk), theirs[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_gradients_in_float64(smoothing):
    hidden, weight, targets = sample(rows=9, width=4, vocab=7, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: chunked(h, w, targets, smoothing, 4), (hidden, weight))


@pytest.mark.parametrize("scale", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_half_precision_errs_no_more_than_the_plain_way(device, dtype, scale):
    inputs = sample(rows=300, width=64, vocab=1001, device=device, scale=scale)
    exact = with_gradients(plain, *(x.double() for x in inputs[:2]), inputs[2])
    errors = []
    for loss in (chunked, plain):
        hidden, weight = (x.detach().requires_grad_() for x in inputs[:2])
        with torch.autocast(device, dtype=dtype):
            value = loss(hidden, weight, inputs[2])
        value.backward()
        assert value.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
        found = (value.detach(), hidden.grad, weight.grad)
        errors.append([((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)])
    for ours, theirs in zip(*errors, strict=True):
        assert ours < 1.5 * theirs + 1e-6


def test_half_precision_weights_without_autocast():
    hidden, weight, targets = sample(dtype=torch.bfloat16)
    _, *ours = with_gradients(chunked, hidden, weight, targets)
    _, *exact = with_gradients(plain, hidden.double(), weight.double(), targets)
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - b).norm() < 0.01 * b.norm()


@pytest.mark.parametrize(("dtype", "gain"), [(torch.bfloat16, 1.0), (torch.float16, FP16_GAIN)])
def test_the_gradient_a_gpu_multiplies_keeps_small_probabilities(dtype, gain):
    """50,000 words: nearly all probabilities are below 6e-5, where fp16 loses its digits."""
    hidden, weight, targets = sample(rows=4, vocab=50_048, scale=0.2)
    logits = (hidden @ weight.T).detach()
    targets = targets.clamp(min=0)
    _, grad = _losses_and_gradient(logits, targets, 50_048, 0.0, dtype, gain)
    assert grad.dtype == dtype
    exact = logits.double().softmax(1) - F.one_hot(targets, 50_048)
    relative = ((grad.double() / gain - exact) / exact).abs()
    normal = exact.abs() * gain > torch.finfo(dtype).tiny
    assert (exact.abs() < 6e-5).float().mean() > 0.9 and normal.float().mean() > 0.99
    assert relative[normal].max() < torch.finfo(dtype).eps


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that anything returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return out


def test_full_logits_never_exist():
    rows, vocab, chunk = 512, 777, 64
    hidden, weight, targets = sample(rows=rows, width=16, vocab=vocab)

    def largest(loss):
        with Largest() as seen:
            with_gradients(loss, hidden, weight, targets)
        return seen.elements

    assert largest(plain) == rows * vocab
    assert largest(lambda *inputs: lm_loss(*inputs, chunk=chunk)) == chunk * 832  # 777 padded
    with Largest() as seen:
        lm_losses(hidden, weight, targets, chunk=chunk)
    assert seen.elements == chunk * 832


def test_a_chunk_of_its_own_choice_is_a_part_of_a_large_batch():
    with Largest() as seen:
        with_gradients(lm_loss, *sample(rows=4096, width=4, vocab=2048))
    assert seen.elements <= 4096 * 2048 // 4


def test_the_host_never_waits_for_the_device():
    """On the meta device nothing has a value to wait for: asking for one raises."""
    _, grad_hidden, grad_weight = with_gradients(chunked, *sample(device="meta"))
    assert (grad_hidden.shape, grad_weight.shape) == ((50, 16), (97, 16))


def test_rows_that_do_not_count_change_nothing_whatever_they_hold():
    hidden, weight, targets = sample()
    value, grad_hidden, grad_weight = with_gradients(chunked, hidden, weight, targets)
    ignored = targets == -100
    other = hidden.detach().clone()
    other[ignored] = torch.nan
    again = with_gradients(chunked, other, weight, targets)
    assert torch.equal(value, again[0]) and torch.equal(grad_weight, again[2])
    assert (grad_hidden[ignored] == 0).all() and (again[1][ignored] == 0).all()


def test_nothing_that_counts_gives_zero():
    hidden, weight, targets = sample()
    found = with_gradients(chunked, hidden, weight, torch.full_like(targets, -100), 0.1)
    assert all((x == 0).all() for x in found)
    found = with_gradients(chunked, hidden[:0], weight, targets[:0])
    assert found[0] == 0 and (found[2] == 0).all()


def test_only_wanted_gradients_are_formed():
    hidden, weight, targets = sample()
    _, grad_hidden, grad_weight = with_gradients(chunked, hidden, weight, targets)
    products = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_, torch.ops.aten.addmm):
                products.append(function)
            return function(*args, **(kwargs or {}))

    for frozen, count in (((), 3), ((0,), 2), ((1,), 2), ((0, 1), 1)):
        leaves = [x.detach().requires_grad_(i not in frozen) for i, x in enumerate((hidden, weight))]
        products.clear()
        with Products():
            value = lm_loss(*leaves, targets)
        assert len(products) == count
        if len(frozen) == 2:
            assert not value.requires_grad
            continue
        value.backward()
        for i, (leaf, expected) in enumerate(zip(leaves, (grad_hidden, grad_weight), strict=True)):
            if i in frozen:
                assert leaf.grad is None
            else:
                torch.testing.assert_close(leaf.grad, expected, rtol=1e-5, atol=1e-6)


def test_backward_twice():
    """Refused, unless the graph was kept. Its gradients have no gradients."""
    hidden, weight, targets = sample()
    loss = chunked(hidden, weight, targets)
    loss.backward(retain_graph=True)
    once = hidden.grad.clone()
    loss.backward()
    assert torch.equal(hidden.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    (grad,) = torch.autograd.grad(chunked(hidden, weight, targets), hidden, create_graph=True)
    assert not grad.requires_grad


@pytest.mark.parametrize("target", [97, 120, -1])
def test_a_target_outside_the_vocabulary_is_refused(target):
    """Also one that the padding, 97 to 127, would have a place for."""
    hidden, weight, targets = sample()
    targets[3] = target
    with pytest.raises(RuntimeError, match="out of bounds"):
        chunked(hidden, weight, targets)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("aot_eager", None),
        ("aot_eager", torch.bfloat16),
        pytest.param("inductor", torch.bfloat16, marks=[pytest.mark.compiler, pytest.mark.slow]),
    ],
)
def test_composes_with_compile_without_a_graph_break(backend, dtype):
    inputs = sample()

    def loss(hidden, weight, targets):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            return chunked(hidden * 2, weight, targets, chunk=32)

    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    found, expected = with_gradients(compiled, *inputs), with_gradients(loss, *inputs)
    tolerance = 1e-5 if dtype is None else 1e-2
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# In the reference GPT


def model(**fields):
    sizes = {"vocab_size": 97, "d_model": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 40}
    made = oelm.OelmGPTForCausalLM(oelm.OelmGPTConfig(**(sizes | fields)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.2)
    return made


def text():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 97, (3, 21), generator=generator)
    labels = ids.clone()
    labels[0, :5] = -100
    return ids, labels


def gradients(model):
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)])
def test_a_model_learns_the_same_without_its_logits(tied, items):
    """With tied weights the gradient is the sum of the embedding's and the head's."""
    lm, (ids, labels) = model(tie_word_embeddings=tied).train(), text()
    with_logits = lm(ids, labels=labels, num_items_in_batch=items, skip_logits=False)
    assert with_logits.logits.shape == (3, 21, 97)
    with_logits.loss.backward()
    expected = gradients(lm)
    without = lm(ids, labels=labels, num_items_in_batch=items)
    assert without.logits is None
    without.loss.backward()
    torch.testing.assert_close(without.loss, with_logits.loss, rtol=1e-6, atol=0)
    for name, grad in gradients(lm).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6)


def test_a_model_keeps_its_logits_for_measuring():
    lm, (ids, labels) = model().eval(), text()
    out = lm(ids, labels=labels)
    assert out.logits.shape == (3, 21, 97)
    assert lm.train()(ids).logits.shape == (3, 21, 97)
    lm.eval()
    following = torch.cat([labels[:, 1:], torch.full((3, 1), -100)], 1)
    losses = lm(ids, shift_labels=following, skip_logits=True, reduction="none")
    assert losses.logits is None
    expected = F.cross_entropy(out.logits.transpose(1, 2), following, reduction="none")
    torch.testing.assert_close(losses.loss, expected.detach(), rtol=1e-5, atol=1e-6)
    summed = lm(ids, labels=labels, skip_logits=True, reduction="sum").loss
    torch.testing.assert_close(summed, expected.sum(), rtol=1e-6, atol=0)
    assert lm(ids, shift_labels=following).loss == out.loss
    smooth = lm(ids, labels=labels, skip_logits=True, label_smoothing=0.1).loss
    by_hand = F.cross_entropy(out.logits.transpose(1, 2), following, label_smoothing=0.1)
    torch.testing.assert_close(smooth, by_hand, rtol=1e-6, atol=0)


def test_a_batch_without_targets_teaches_nothing():
    lm, (ids, labels) = model().train(), text()
    loss = lm(ids, labels=torch.full_like(labels, -100)).loss
    loss.backward()
    assert loss == 0
    assert all((grad == 0).all() for grad in gradients(lm).values())


def test_another_head_or_loss_is_called_and_not_imitated():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    lm, (ids, labels) = model().train(), text()
    own = lm(ids, labels=labels, skip_logits=False)
    head = Doubled(32, 97, bias=False)
    head.weight = lm.lm_head.weight
    lm.lm_head = head
    out = lm(ids, labels=labels)
    torch.testing.assert_close(out.logits, 2 * own.logits)
    with pytest.raises(UserError, match="own lm_head"):
        lm(ids, labels=labels, skip_logits=True)
    lm = model().train()
    lm.loss_function = lambda logits, labels, **_: logits.sum() + labels.sum()
    assert lm(ids, labels=labels).loss == own.logits.sum() + labels.sum()


def test_what_only_the_chunked_loss_knows_is_refused_elsewhere():
    lm, (ids, labels) = model().eval(), text()
    with pytest.raises(UserError, match="needs labels"):
        lm(ids, skip_logits=True)
    for options in ({"reduction": "sum"}, {"label_smoothing": 0.1}):
        with pytest.raises(UserError, match="need skip_logits=True"):
            lm(ids, labels=labels, **options)
    with pytest.raises(UserError, match="not 'max'"):
        lm(ids, labels=labels, skip_logits=True, reduction="max")


def test_a_compiled_model_gives_the_same_loss():
    lm, (ids, labels) = model().train(), text()
    expected = lm(ids, labels=labels).loss
    expected.backward()
    grads = gradients(lm)
    loss = torch.compile(lm, backend="aot_eager")(ids, labels=labels).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, grad in gradients(lm).items():
        torch.testing.assert_close(grad, grads[name], rtol=1e-4, atol=1e-6)


def test_a_sharded_model_gives_the_same_gradients():
    """FSDP2 gathers the tied weight for the whole forward pass, so the head's is there to be used."""
    whole, (ids, labels) = model().train(), text()
    whole(ids, labels=labels).loss.backward()
    expected = gradients(whole)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded, mesh = model().train(), init_device_mesh("cpu", (1,))
        for block in sharded.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        sharded(ids, labels=labels).loss.backward()
        found = {name: grad.full_tensor() for name, grad in gradients(sharded).items()}
    finally:
        dist.destroy_process_group()
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-6)


# In training


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("stories"), random.Random(0)
    for name, count in (("train", 60), ("validation", 20)):
        texts = [sentence(rng) for _ in range(count)]
        parquet(folder / "tinystories" / f"{name}.parquet", text=texts)
    return prepare(load_task("tinystories", data_dir=folder), tokenizer="train:300", cache=folder / "cache")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_objective_measures_what_a_gpt2_with_equal_logits_has(store, smoothing):
    """The GPT-2 goes by its full logits. The last window is short, so some targets do not count."""
    lm = model(vocab_size=store.vocab_size).eval()
    twin = to_gpt2(lm)
    objective = LanguageObjective(store, 16, label_smoothing=smoothing)
    batch = objective.batch("test", np.arange(len(objective.windows["test"].lengths)))
    assert (batch.targets["labels"] == -100).any()
    ours, theirs = (objective.loss(m, batch) for m in (lm, twin))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(
        lm.transformer.wte.weight.grad, twin.transformer.wte.weight.grad, rtol=1e-3, atol=1e-5
    )
    with torch.no_grad():
        (loss, found), (other, expected) = (objective.outputs(m, batch) for m in (lm, twin))
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(other.item(), rel=1e-6)
    np.testing.assert_allclose(found["scores"], expected["scores"], rtol=1e-5)
    assert (found["tokens"] == expected["tokens"]).all()
    assert found["tokens"].sum() == objective.count("test", np.arange(len(found["tokens"])))


def test_the_objective_asks_the_reference_gpt_for_no_logits(store):
    lm, objective = model(vocab_size=store.vocab_size), LanguageObjective(store, 16)
    kept = []
    lm.register_forward_hook(lambda _, __, out: kept.append(out.logits))
    batch = objective.batch("train", np.arange(4))
    objective.loss(lm.train(), batch)
    objective.outputs(lm.eval(), batch)
    assert kept == [None, None]


# On a GPU


@on_gpu
def test_a_cuda_graph_replays_it():
    hidden, weight, targets = sample(rows=300, width=64, vocab=1001, device="cuda")

    def step():
        hidden.grad = weight.grad = None
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = lm_loss(hidden, weight, targets, chunk=128)
        loss.backward()
        return loss.detach(), hidden.grad, weight.grad

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    other, _, others = sample(rows=300, width=64, vocab=1001, device="cuda", scale=1.0)
    with torch.no_grad():
        hidden.copy_(other.flip(0))
        targets.copy_(others.flip(0))
    graph.replay()
    replayed = [x.clone() for x in found]
    for a, b in zip(replayed, step(), strict=True):
        torch.testing.assert_close(a, b)


@on_gpu
def test_memory_on_a_gpu():
    """16,384 rows of 50,257 words: their logits alone are 1.6 GB in bf16."""
    hidden, weight, targets = sample(rows=16_384, width=64, vocab=50_257, device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            lm_loss(hidden, weight, targets, chunk=1024).backward()
    assert torch.cuda.max_memory_allocated() - before < 0.6e9
