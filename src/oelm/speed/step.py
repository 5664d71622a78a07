"""The optimizer step by the fast paths: the same sums as `training.step.PlainStep`."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from oelm.audit import method_of
from oelm.data import Epoch
from oelm.data.assemble import Batch
from oelm.models.gpt import OelmGPTPreTrainedModel
from oelm.speed.adamw import HostAdamW, RecordableAdamW, can_be_one_kernel, clip_in_step
from oelm.speed.bf16_copies import Bf16Copies
from oelm.speed.capabilities import KERNELS, device_capabilities
from oelm.speed.cuda_graphs import GraphedStep
from oelm.speed.forward import FastForward
from oelm.speed.live_rows import live_weights, put_back, set_aside
from oelm.speed.operations import have_kernels, without_kernels
from oelm.speed.pretrained import PackedForward, why_not
from oelm.speed.row_windows import RowWindows, make_windows
from oelm.speed.watch import TOLERANCE, compare, due, has_dropout, measure, measure_expected
from oelm.training.checkpoint import Checkpoint, LiveEmbeddings, Tensors
from oelm.training.parallel import DTYPES
from oelm.training.schedule import learning_rate, make_optimizer, parameter_scales, shrinkage
from oelm.training.step import PlainStep, Watch


class FastStep(PlainStep):
    plain = False

    def __init__(self, *given: Any, watch: Watch | None = None) -> None:
        """`given`: the arguments of PlainStep; with `watch` it is compared with the plain step now and
        then."""
        super().__init__(*given)
        raw, self.watch = self.raw, watch
        self.forward: FastForward | PackedForward | None = None
        if isinstance(raw, OelmGPTPreTrainedModel):
            sizes = raw.config.d_model, raw.config.num_heads
            self.forward = FastForward(raw, have_kernels(self.state.device, self.dtype, *sizes))
        elif self.layout.packed:
            self.forward = PackedForward(raw)
        if self.forward is not None:
            self.forward.install()
        self.windows = self._make_windows()
        if self.windows is not None:
            self.parameters.append(self.windows.weight)
        self.graphed = self._make_graphed() if self.eager is None else None

    def _prepare_model(self) -> None:
        training, raw = self.config.training, self.raw
        self.can = device_capabilities(self.state.device)
        self.rows = None  # of the embedding: (live, all)
        # An embedding that is frozen at any time keeps all its rows.
        frozen = "embeddings" in method_of(raw).freeze
        if not training.fsdp and not self.objective.kind.stream and not frozen:
            self.rows = set_aside(raw, self.objective.store.used_tokens())
        self.padded, self.eager = self._why_padded(), self._why_eager()
        packed, recorded = self.padded is None, self.eager is None
        self.layout = replace(self.layout, packed=packed, round_widths=recorded)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrix products."""
        return DTYPES.get(self.precision, torch.float32)

    def _why_padded(self) -> str | None:
        """Why texts are padded in this run; None if they are packed."""
        if not self.objective.kind.packable:
            return "only the texts of classifiers are packed"
        if self.can["packed"] is not None:
            return self.can["packed"]
        if not isinstance(self.raw, OelmGPTPreTrainedModel):
            return why_not(self.raw, self.state.device, self.dtype, self.objective.store.max_length)
        if self.raw.config.attention_dropout:
            return f"attention dropout {self.raw.config.attention_dropout:g} needs padded attention"
        return None

    def _why_eager(self) -> str | None:
        """Why a step is not a CUDA graph in this run; None if it is."""
        if self.can["graphs"] is not None:
            return self.can["graphs"]
        if self.state.num_processes > 1:
            return "several processes exchange gradients"
        if self.precision == "fp16":
            return "the fp16 loss scaler may skip a step, which a CUDA graph cannot"
        if self.config.training.gradient_checkpointing:
            return "gradient checkpointing draws its random numbers twice"
        if any(getattr(module, "layerdrop", 0) for module in self.raw.modules()):
            return "layers are dropped anew at every step"
        return None

    def _make_optimizer(self) -> torch.optim.AdamW:
        on_host = self.state.device.type == "cpu" and not self.config.training.fsdp
        kind = RecordableAdamW if self.eager is None else HostAdamW if on_host else torch.optim.AdamW
        return make_optimizer(self.raw, self.config.training, kind, self.freezing)

    def _rebuild(self) -> None:
        """Record graphs again, with copies and gradients of the parameters that train now."""
        super()._rebuild()
        if self.graphed is not None:
            assert isinstance(self.optimizer, RecordableAdamW)
            self.optimizer.clear_gathered()
            self.graphed = None  # frees the memory of the old graphs first
            self.graphed = self._make_graphed()

    def _make_windows(self) -> RowWindows | None:
        store, live = self.objective.store, list(live_weights(self.raw).values())
        # fp16 may skip a step, and an encoder-decoder also reads tokens of its targets.
        supported = self.precision != "fp16" and not self.objective.kind.writes
        if not live or not supported or self.state.num_processes > 1:
            return None
        return make_windows(live[0], self.optimizer, store, self.resolved.plan)

    def _make_graphed(self) -> GraphedStep:
        """The step that is recorded as CUDA graphs, with bf16 copies in bf16."""
        self.scale = torch.zeros((), device=self.state.device)
        self.copies = None
        copied: list[nn.Parameter] = []
        if self.precision == "bf16":
            own = self.forward if isinstance(self.forward, FastForward) else None
            self.copies = Bf16Copies(self.raw, torch.bfloat16, own)
            assert isinstance(self.optimizer, RecordableAdamW)
            self.optimizer.clip = self.config.training.clip
            self.optimizer.copies = {id(weight): copy for weight, copy in self.copies.trained}
            copied = [copy for _, copy in self.copies.trained]
        trained = [p for p in self.parameters if p.requires_grad]
        refresh_if_changed = (lambda: None) if self.copies is None else self.copies.refresh_if_changed
        whole = self.config.training.accumulate == 1
        return GraphedStep(
            self._compute, self._finish_recorded, refresh_if_changed, self.scale, whole, [*trained, *copied]
        )

    def _compute(self, batch: Batch) -> Tensor:
        """The loss of a batch on the device, times `scale`; its gradients are added."""
        with self.copies.installed() if self.copies is not None else contextlib.nullcontext():
            with self.autocast():
                loss = self.objective.loss(self.model, batch) * self.scale
            loss.backward()
        if self.copies is not None:
            assert isinstance(self.optimizer, RecordableAdamW)
            self.copies.collect(self.optimizer.make_gradients)
            self.optimizer.gather()
        return loss.detach()

    def _finish_recorded(self) -> Tensor:
        """Clip the gradients, take the optimizer's step, and return the gradients' norm before clipping."""
        optimizer = self.optimizer
        assert isinstance(optimizer, RecordableAdamW)
        if optimizer.gathered:
            optimizer.step()
            norm = optimizer.norm
        else:
            trained = [p for p in self.parameters if p.requires_grad]
            norm = clip_in_step(optimizer, trained, self.config.training.clip)
            optimizer.step()
            if self.copies is not None:
                self.copies.refresh()
        # Without accumulation gradients are made again at each step; with it they are summed in place.
        optimizer.zero_grad(set_to_none=self.config.training.accumulate == 1)
        return norm

    def take(self, number: int, batches: Epoch, k: int) -> tuple[Tensor, Tensor, int]:
        """As the plain step; compared with it when `due`."""
        self._begin(number)
        if self.watch is None or self.why_unwatched() or not due(self.watch, number):
            return self._take(number, batches, k)
        try:
            expected = measure_expected(self, batches, k)  # before the weights change
        except torch.OutOfMemoryError:  # training itself fits into memory and must not fail by the comparison
            torch.cuda.empty_cache()
            self.watch.skipped, self.watch.again = self.watch.skipped + 1, False
            return self._take(number, batches, k)
        fast = measure(self, batches, k, plain=False) if has_dropout(self.raw) else None
        loss, norm, tokens = self._take(number, batches, k)
        fast = fast or {"loss": float(loss), "grad_norm": float(norm)}
        compare(self.watch, fast, expected, self.precision, number + 1)
        return loss, norm, tokens

    def _take(self, number: int, batches: Epoch, k: int) -> tuple[Tensor, Tensor, int]:
        if self.windows is None:
            return super().take(number, batches, k)
        self.windows.prepare(batches, k)
        result = super().take(number, batches, k)
        self.windows.count(learning_rate(self.resolved, number))
        return result

    def _backward(self, batch: Batch, count: int, last: bool) -> Tensor:
        if self.graphed is None:
            return super()._backward(batch, count, last)
        return self.graphed.backward(batch, 1 / count)

    def _use_gradients(self) -> Tensor:
        if self.graphed is not None:
            return self.graphed.step()
        training = self.config.training
        if self.scaler.is_enabled() or training.fsdp or not self.optimizer.defaults.get("fused"):
            return super()._use_gradients()
        norm = clip_in_step(self.optimizer, self.parameters, training.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """A context in which the model computes by the plain path."""
        if self.forward is not None:
            self.forward.remove()
        try:
            with without_kernels():
                yield
        finally:
            if self.forward is not None:
                self.forward.install()

    def sync(self) -> None:
        if self.windows is not None:
            self.windows.write_back()

    def _live_embeddings(self) -> LiveEmbeddings:
        return live_weights(self.raw)

    def restore(self, checkpoint: Checkpoint, moments: bool = True) -> None:
        for embedding in live_weights(self.raw).values():
            embedding.close()
        super().restore(checkpoint, moments)

    def hand_over(self, steps: int) -> tuple[Tensors, Tensors]:
        model, moments = self.capture()
        for name, live in live_weights(self.raw).items():  # idle rows get the weight decay they missed
            model[name][live.idle] *= self._shrinkage(name, steps)
        self.close()
        return model, moments

    def finish(self, steps: int) -> None:
        put_back(self.raw, lambda name: self._shrinkage(name, steps))

    def _shrinkage(self, name: str, steps: int) -> float:
        scale, decay = parameter_scales(self.raw, self.config.training)[name]
        return shrinkage(self.resolved, scale, decay, steps)

    def close(self) -> None:
        if self.forward is not None:
            self.forward.remove()

    def why_unwatched(self) -> str | None:
        if self.state.num_processes > 1:
            return "several processes"
        return None if self.precision in TOLERANCE else f"{self.precision} has no tolerance"

    def paths(self) -> dict[str, Any]:
        failed = "" if self.graphed is None else self.graphed.failed
        return {
            "padded": self.padded,
            "eager": f"it could not be recorded: {failed}" if failed else self.eager,
            "own_kernels": self.forward is not None and self.forward.kernels,
            "own_adamw": self.eager is None
            and self.precision == "bf16"
            and can_be_one_kernel(self.parameters),
            "rows": self.rows,
            "table": None if self.windows is None else self.windows.capacity,
        }

    def _missing(self) -> dict[str, list[str]]:
        """Reason -> the kernels of our own that do not run on this GPU."""
        missing: dict[str, list[str]] = {}
        for name in KERNELS if self.state.device.type == "cuda" else ():
            if why := self.can[name]:
                missing.setdefault(why, []).append(name.replace("_", " "))
        return missing

    def __str__(self) -> str:
        paths = self.paths()
        parts = [
            "texts are packed" if self.padded is None else f"texts are padded ({self.padded})",
            "a step is a CUDA graph" if self.eager is None else f"no CUDA graphs ({self.eager})",
        ]
        if paths["own_kernels"]:
            norms = " and norms" if isinstance(self.forward, FastForward) else ""
            parts.append(f"attention{norms} by kernels of our own")
        parts += [f"PyTorch's {', '.join(names)} ({why})" for why, names in self._missing().items()]
        if paths["own_adamw"]:
            parts.append("AdamW is one kernel for all weights")
        if self.rows:
            table = f", {paths['table']:,} at a time" if paths["table"] else ""
            parts.append(f"{self.rows[0]:,} of {self.rows[1]:,} rows of the embedding are in use{table}")
        return "; ".join(parts)
