"""Private and unstable APIs of other libraries: only in `oelm.system.private_*`, each as we expect it."""

import ast
import contextlib
import importlib.util
import inspect
import re
import time
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
import typer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from oelm.system import private_accelerate, private_peft, private_torch, private_transformers
from tests.tiny import build

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "oelm"
MODULES = (private_torch, private_transformers, private_accelerate, private_peft)
# The modules of each library that its documentation describes for users.
PUBLIC = {
    "torch": [
        "torch", "torch.compiler.config", "torch.distributed", "torch.distributed.device_mesh",
        "torch.distributed.fsdp", "torch.distributed.tensor", "torch.nn", "torch.nn.attention",
        "torch.nn.functional", "torch.profiler", "torch.utils.data",
    ],
    "transformers": ["transformers", "transformers.modeling_outputs", "transformers.utils.logging"],
    "accelerate": ["accelerate"],
    "peft": ["peft"],
    "typer": ["typer"],
    "triton": ["triton", "triton.language"],
}  # fmt: skip
# Attributes without an underscore that are no more public: of optimizers, and of PEFT's layers.
UNSTABLE = {"grad_scale", "found_inf", "base_layer", "lora_A", "lora_B", "get_delta_weight"}
STANDARD = {"_replace", "_asdict", "_fields", "_exit"}  # of named tuples and `os`


def defined_names(tree):
    """Every name with a leading underscore that a module defines: functions, attributes of self, classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
        ):
            yield node.attr


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and len(name) > 1 and name not in STANDARD


def imported_modules(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in PUBLIC:
        return [
            module if find_spec(module := f"{node.module}.{alias.name}") else node.module
            for alias in node.names
        ]
    return []


def find_spec(module):
    """Whether there is a module of this name: `from torch import nn` imports one, `Tensor` is none."""
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:  # its parent is no package
        return None


def private_uses(text):
    """(line, what) of every use in a module's text."""
    tree = ast.parse(text)
    ours = set(defined_names(tree))
    for node in ast.walk(tree):
        for module in imported_modules(node):
            library = module.partition(".")[0]
            if module not in PUBLIC.get(library, [module]):
                yield node.lineno, f"import {module}"
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in PUBLIC:
            for alias in node.names:
                if is_private(alias.name):
                    yield node.lineno, f"import {alias.name}"
        if isinstance(node, ast.Attribute):
            mine = ast.unparse(node.value) in ("self", "cls") or node.attr in ours
            if node.attr in UNSTABLE or (is_private(node.attr) and not mine):
                yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.keyword) and node.arg and is_private(node.arg):
            yield node.value.lineno, f"{node.arg}="
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and (name.value in UNSTABLE or is_private(name.value)):
                yield node.lineno, ast.unparse(node)


def test_nothing_else_uses_a_private_api():
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith("system/private_"):
            uses = [f"{name}:{line}: {what}" for line, what in private_uses(path.read_text(encoding="utf-8"))]
            found |= dict.fromkeys(uses)
    assert not found, "put these behind a function in oelm/system/private_*.py, or use a public API:\n" + (
        "\n".join(found)
    )


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "from torch._inductor import config",
        "from torch.nn.attention.varlen import varlen_attn",
        "from transformers import _private",
        "from transformers import initialization",
        "from transformers.pytorch_utils import Conv1D",
        "import torch\ntorch._foreach_add_(a, b)",
        "tensor._version",
        "optimizer.found_inf = x",
        "setattr(parameter, '_is_hf_initialized', True)",
        "cached_file(name, _raise_exceptions_for_missing_entries=False)",
        "layer.get_delta_weight('default')",
    ],
)
def test_a_private_use_is_noticed(text):
    assert list(private_uses(text))


def test_public_uses_and_our_own_names_are_not():
    text = """
from torch import Tensor, nn
from transformers.utils import logging
class Model:
    def _forward(self): self._kept = 1
    def run(self, other: 'Model'): return other._forward(), other._kept, tiles._replace(stages=2)
"""
    assert not list(private_uses(text))


def test_attention_of_transformers_is_known_by_name_and_can_be_ours():
    model = build("bert")
    assert private_transformers.attention_name(model) == "sdpa"
    attention, mask = private_transformers.sdpa_functions()
    q = torch.randn(1, 2, 5, 8)
    module = nn.Module()
    module.is_causal = False
    found, _ = attention(module, q, q, q, None)
    right = nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2)
    torch.testing.assert_close(found, right)
    assert callable(mask)
    seen = []

    def ours(module, *parts, **options):
        seen.append(options)
        return attention(module, *parts, **options)

    transformers.AttentionInterface.register("test", ours)
    transformers.AttentionMaskInterface.register("test", mask)
    model.set_attn_implementation("test")
    model(torch.ones(1, 4, dtype=torch.long), kept="for every layer")
    assert [options["kept"] for options in seen] == ["for every layer"] * 3


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are listed on Linux only")
def test_a_mesh_lets_its_groups_go():
    """The mesh lives on, as PyTorch's caches have it, and the group's threads end all the same."""

    def workers():
        names = []
        for task in Path("/proc/self/task").glob("*"):
            with contextlib.suppress(OSError):  # a thread may end between the list and its name
                names.append((task / "comm").read_text())
        return sum("gloo" in name for name in names)

    def soon(holds):
        """A thread names itself once it runs, and leaves the list a little after it was joined."""
        end = time.monotonic() + 30
        while not holds() and time.monotonic() < end:
            time.sleep(0.01)
        return holds()

    before = workers()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    mesh = init_device_mesh("cpu", (1,))
    assert soon(lambda: workers() >= before + 3)  # gloo's loop and two runners
    private_torch.release_groups(mesh)
    dist.destroy_process_group()
    assert soon(lambda: workers() == before)
    assert mesh.size() == 1


def test_every_function_here_has_a_test():
    tested = Path(__file__).read_text(encoding="utf-8")
    for module in MODULES:
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                assert f"{module.__name__.rpartition('.')[2]}.{name}(" in tested, name


def test_the_libraries_have_upper_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = [*project["dependencies"], *(d for ds in project["optional-dependencies"].values() for d in ds)]
    for library in PUBLIC:
        bounds = next(line for line in listed if re.match(rf"{library}\b", line))
        assert re.search(r",<\d", bounds), bounds


# PyTorch


def test_a_tensors_version_counts_changes_in_place():
    tensor = torch.zeros(3)
    before = private_torch.version_of(tensor)
    tensor.add_(1)
    assert private_torch.version_of(tensor) == before + 1
    tensor.data.add_(1)
    assert private_torch.version_of(tensor) == before + 1


def test_many_tensors_are_copied_and_added_in_one_call():
    targets, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2).bfloat16(), torch.arange(3.0)]
    private_torch.copy_all_(targets, sources)
    assert [t.tolist() for t in targets] == [[1, 1], [0, 1, 2]]
    private_torch.add_all_(targets, [torch.ones(2), torch.ones(3)])
    assert [t.tolist() for t in targets] == [[2, 2], [1, 2, 3]]


@pytest.mark.parametrize("dtypes", [(), (torch.float32,) * 40, (torch.float32, torch.bfloat16) * 5])
def test_the_norm_of_all_is_pytorchs(dtypes):
    tensors = [torch.randn(7, n + 1, dtype=dtype) for n, dtype in enumerate(dtypes)]
    assert torch.equal(private_torch.total_norm(tensors), nn.utils.get_total_norm(tensors))


def test_fused_adamw_is_the_optimizers_step():
    weight, gradient = torch.randn(5), torch.randn(5)
    parameter = nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW(
        [parameter], lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2, fused=True
    )
    mean, square = torch.zeros(5), torch.zeros(5)
    for number in (1, 2):
        parameter.grad = gradient.clone()
        optimizer.step()
        private_torch.fused_adamw_(
            [weight], [gradient], [mean], [square], [torch.tensor(float(number))],
            lr=0.1, beta1=0.8, beta2=0.9, weight_decay=0.2, eps=1e-6,
        )  # fmt: skip
    assert torch.equal(weight, parameter)
    assert torch.equal(mean, optimizer.state[parameter]["exp_avg"])


def stepped(prepare):
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, eps=1.0, weight_decay=0.0, fused=True)
    parameter.grad = torch.tensor([4.0, -8.0])
    prepare(optimizer, parameter)
    optimizer.step()
    return parameter.detach()


def test_a_fused_optimizer_divides_gradients_in_its_step():
    def divide(optimizer, _):
        private_torch.divide_gradients_in_step(optimizer, torch.tensor(4.0))

    def divided(_, parameter):
        parameter.grad /= 4

    assert torch.equal(stepped(divide), stepped(divided))
    assert not torch.equal(stepped(divide), stepped(lambda *_: None))

    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], fused=True)
    assert private_torch.divisor_of(optimizer) is None
    private_torch.divide_gradients_in_step(optimizer, divisor := torch.tensor(4.0))
    assert private_torch.divisor_of(optimizer) is divisor


def test_a_fused_optimizer_does_not_step_after_a_fault():
    def fault(optimizer, _):
        private_torch.divide_gradients_in_step(optimizer, torch.tensor(1.0))
        private_torch.fault_of(optimizer).fill_(1)

    def no_fault(optimizer, _):
        private_torch.divide_gradients_in_step(optimizer, torch.tensor(1.0))
        assert private_torch.fault_of(optimizer) is private_torch.fault_of(optimizer)

    assert stepped(fault).tolist() == [1.0, -2.0]
    assert torch.equal(stepped(no_fault), stepped(lambda *_: None))


def test_a_recording_that_failed_leaves_nothing_behind():
    """What is called is there in every build; the rest shows on a GPU, and in tests/speed/test_on_gpu.py."""
    assert "_cuda_endAllocateToPool" in vars(torch._C)
    generator = torch.Generator()
    assert callable(generator.graphsafe_set_state) and callable(generator.clone_state)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(7)
        drawn = torch.rand(3, device="cuda")
        torch.cuda.manual_seed(7)
        private_torch.end_failed_recording(torch.device("cuda"), torch.cuda.graph_pool_handle())
        assert torch.equal(drawn, torch.rand(3, device="cuda"))


def test_a_layer_is_copied_with_another_weight():
    layer = nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    other = private_torch.with_weight(layer, torch.zeros(2, 3))
    assert type(other) is nn.Linear and not other.weight.any() and not other.weight.requires_grad
    assert layer.weight.equal(before) and layer.bias is not None


def test_new_layers_are_not_drawn_while_a_model_draws_its_own():
    before = torch.get_rng_state()
    with private_torch.Undrawn():
        layers = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4))
        layers[1].weight.data.fill_(2.0)
    assert torch.equal(torch.get_rng_state(), before)
    assert layers[1].weight.requires_grad and layers[1].weight.eq(2).all()
    nn.Linear(4, 4)
    assert not torch.equal(torch.get_rng_state(), before)


def test_a_compiled_or_wrapped_model_is_unwrapped():
    model = nn.Linear(2, 2)
    assert private_torch.unwrap(model) is model
    assert private_torch.unwrap(nn.DataParallel(torch.compile(model))) is model


def test_variable_length_attention_takes_our_arguments():
    names = list(inspect.signature(private_torch.varlen_attn).parameters)
    assert names[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]


# transformers


def test_auto_classes_know_which_architectures_they_have():
    bert, t5 = build("bert").config, build("t5").config
    assert private_transformers.has_model_for("AutoModelForSeq2SeqLM", t5)
    assert not private_transformers.has_model_for("AutoModelForSeq2SeqLM", bert)
    assert private_transformers.has_model_for("AutoModelForCausalLM", build("oelm-gpt").config)  # registered


@pytest.mark.parametrize(("name", "block"), [("bert", "BertLayer"), ("t5", "T5Block"), ("oelm-gpt", "Block")])
def test_a_model_names_the_blocks_it_is_divided_into(name, block):
    names = private_transformers.block_class_names(build(name))
    assert block in names
    assert any(type(module).__name__ in names for module in build(name).modules())


def test_loaded_parameters_are_told_from_new_ones_while_a_model_is_initialised(tmp_path):
    seen = {}

    class Recorder(transformers.BertForSequenceClassification):
        def _init_weights(self, module):
            for name, parameter in module.named_parameters(recurse=False):
                seen[type(module).__name__, name] = private_transformers.is_loaded(parameter)

    model = build("bert")
    saved = {name: value for name, value in model.state_dict().items() if name != "classifier.bias"}
    model.save_pretrained(tmp_path, state_dict=saved)
    Recorder.from_pretrained(tmp_path)
    assert seen == {("Linear", "weight"): True, ("Linear", "bias"): False}


def test_a_module_that_is_marked_is_not_initialised_again():
    model = build("bert")
    marked, other = model.bert.pooler.dense, model.classifier
    del other._is_hf_initialized
    for module in (marked, other):
        module.weight.data.fill_(7)
    private_transformers.mark_initialized(marked)
    model.init_weights()
    assert marked.weight.eq(7).all() and not other.weight.eq(7).any()


@pytest.mark.parametrize(
    "name",
    ["_init_weights", "_no_split_modules", "_supports_sdpa", "_tied_weights_keys", "_input_embed_layer"],
)
def test_what_the_reference_gpt_overrides_is_there(name):
    assert hasattr(transformers.PreTrainedModel, name)


def test_the_loss_of_a_causal_language_model_is_recognised():
    model = build("gpt2")
    assert private_transformers.is_default_causal_lm_loss(model.loss_function)
    assert not private_transformers.is_default_causal_lm_loss(build("bert").loss_function)
    model.loss_function = lambda **_: None
    assert not private_transformers.is_default_causal_lm_loss(model.loss_function)


@pytest.mark.parametrize(("name", "path"), [("bert", "classifier"), ("oelm-gpt", "classifier")])
def test_a_head_and_nothing_else_is_initialised_again(name, path):
    model = build(name)
    model = (
        model
        if hasattr(model, path)
        else transformers.AutoModelForSequenceClassification.from_config(model.config)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    names = private_transformers.initialize_again(model, path)
    assert names == {f"{path}.weight", f"{path}.bias"}
    for key, parameter in model.named_parameters():
        assert (parameter == 7).all() == (key not in names), key
    assert 0 < model.get_parameter(f"{path}.weight").std() < 0.1


def test_a_file_of_the_hub_is_found_in_its_cache_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot = tmp_path / "models--someone--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    hub = {"cache_dir": tmp_path, "local_files_only": True}
    assert private_transformers.hub_file("someone/model", "config.json", hub) == snapshot / "config.json"
    assert private_transformers.hub_file("someone/model", "other.json", hub) is None


# Accelerate


def test_accelerates_trackers_have_what_we_call():
    classes = private_accelerate.tracker_classes()
    assert {"tensorboard", "wandb", "mlflow"} <= set(classes)
    for name, tracker in classes.items():
        for wanted in ("start", "store_init_configuration", "log", "finish", "requires_logging_directory"):
            assert hasattr(tracker, wanted), (name, wanted)
        assert isinstance(private_accelerate.lacks_package(name), bool)
    for name, argument in private_accelerate.RUN_NAMES.items():
        taken = inspect.signature(classes[name].__init__).parameters
        assert argument in taken or any(p.kind is p.VAR_KEYWORD for p in taken.values()), name
    assert any(private_accelerate.lacks_package(name) for name in classes), "no machine has all of them"
    assert not private_accelerate.lacks_package("a tracker of the user's own")


# PEFT


def test_an_adapted_layer_has_the_parts_we_name():
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    plain = [name for name, _ in model.named_parameters()]
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["0"], init_lora_weights=False)
    layer = peft.inject_adapter_in_model(config, model)[0]
    assert private_peft.has_lora(layer) and not private_peft.has_lora(model[1])
    base = private_peft.base_layer(layer)
    assert type(base) is nn.Linear and private_peft.base_layer(model[1]) is None
    names = [name for name, _ in model.named_parameters() if not private_peft.is_adapter(name)]
    assert [private_peft.plain_name(name) for name in names] == plain
    assert [name for name in names if private_peft.is_adapted(name)] == ["0.base_layer.weight"]
    zeroed = [p for name, p in model.named_parameters() if private_peft.is_second_factor(name)]
    assert [p.shape[1] for p in zeroed] == [2]  # its rank
    x = torch.randn(3, 4)
    merged = nn.functional.linear(x, base.weight + private_peft.weight_change(layer), base.bias)
    torch.testing.assert_close(layer(x), merged)


# typer


def test_usage_errors_are_what_bad_parameters_derive_from():
    from oelm.cli.main import UsageError

    assert UsageError.__name__ == "UsageError" and issubclass(typer.BadParameter, UsageError)
    assert UsageError("what is wrong").format_message() == "what is wrong"
