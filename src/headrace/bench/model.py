"""Model: which rank writes which arrays of a checkpoint.

A pure function of a workload's `model` section and of the number of ranks: model and optimizer states of a
transformer over tensor, pipeline and data parallelism and the stages of ZeRO, or one opaque blob. Files are
named, sized and spread over ranks as DLIO's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace.bench.schema import DATATYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.bench.schema import ModelSection


_TENSORFLOW_INDEX_BYTES: Final = 64  # of a checkpoint's end, and of each tensor


class RankShare(NamedTuple):
    """What a rank writes: file name to the sizes of its arrays, in bytes."""

    model: dict[str, list[int]]
    optimizer: dict[str, list[int]]

    @property
    def nbytes(self) -> int:
        """Of both."""
        return sum(sum(map(sum, states.values())) for states in self)

    def as_tensorflow(self, rank: int) -> RankShare:
        """The same in TensorFlow's files: an index and the data of each state, and one file of a folder."""

        def files_of(states: dict[str, list[int]]) -> Iterator[tuple[str, list[int]]]:
            for name, sizes in states.items():
                state = f"{name.removesuffix('.pt')}.pb-1"
                yield f"{state}.index", [_TENSORFLOW_INDEX_BYTES * (1 + len(sizes))]
                yield f"{state}.data-00000-of-00001", sizes

        last = {"checkpoint": [_TENSORFLOW_INDEX_BYTES]} if rank == 0 else {}
        return RankShare(dict(files_of(self.model)) | last, dict(files_of(self.optimizer)))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the ranks of a job write of a workload's `model`.

    Without a transformer's layers, `model_size_bytes` of opaque state; `optimization_groups` are elements of a
    rank's optimizer arrays instead of what follows from the transformer, `layer_parameters` those of each
    layer's arrays, spread over tensor parallelism.

    Raises:
        ValueError: values do not go together.
    """

    model: ModelSection

    def __post_init__(self) -> None:
        layers, pipeline = self.model.num_layers, self.model.parallelism_pipeline
        if pipeline > 1 and self.model.parallelism_zero_stage == 3:
            raise ValueError("model.parallelism: ZeRO stage 3 cannot go with pipeline parallelism")
        if not self.model.parallelism_data:
            raise ValueError("model.parallelism.data is 0, expected at least 1, or -1")
        if 0 < layers < pipeline:
            least = f"at least model.parallelism.pipeline {pipeline}"
            raise ValueError(f"model.num_layers is {layers}, expected {least}")

    @property
    def copy_ranks(self) -> int:
        """Ranks that one copy of the model is spread over."""
        return self.model.parallelism_tensor * self.model.parallelism_pipeline

    @property
    def layer_elements(self) -> list[int]:
        """Elements of the arrays of a layer: norm, attention, its output, norm, two of the MLP."""
        h, ffn = self.model.transformer_hidden_size, self.model.transformer_ffn_hidden_size
        # Columns of the K and V matrices, with DLIO's whole division.
        heads = self.model.transformer_num_attention_heads
        kv = h // heads * self.model.transformer_num_kv_heads
        return [h, h * (h + 2 * kv), h * h, h, 2 * h * ffn, h * ffn]

    @property
    def parameters(self) -> int:
        """Elements of the whole model: embedding, layers, final norm, output; 0 without layers."""
        if self.model.num_layers <= 0:
            return 0
        hidden = self.model.transformer_hidden_size
        ends = 2 * self.model.transformer_vocab_size * hidden + hidden
        return ends + self.model.num_layers * sum(self.layer_elements)

    def data_parallelism(self, world_size: int) -> int:
        """Copies of the model. Raises ValueError if the ranks do not make whole copies."""
        model, data = self.copy_ranks, self.model.parallelism_data
        wrong = ""
        if data < 0 and world_size % model:
            wrong = f"no multiple of tensor x pipeline parallelism {model}"
        elif data > 0 and world_size > model * data:
            wrong = f"more than tensor x pipeline x data = {model * data}"
        if wrong:
            raise ValueError(f"{world_size} ranks are {wrong}")
        return data if data > 0 else world_size // model

    def share(self, rank: int, world_size: int) -> RankShare:
        """What a rank writes.

        Without ZeRO the first copy of the model writes all; with ZeRO 1 and 2 it writes the model and each
        rank its part of the optimizer; with ZeRO 3 each rank its part of both.
        """
        data = self.data_parallelism(world_size)
        data_rank, model_rank = divmod(rank, self.copy_ranks)
        stage = self.model.parallelism_zero_stage
        share = RankShare({}, {})
        if data_rank == 0 or stage == 3:
            layers = self._layers(model_rank // self.model.parallelism_tensor, data)
            name = f"model_{model_rank}_model_states.pt"
            if layers and self.model.parallelism_pipeline > 1:
                share.model.update({f"layer_{i}-{name}": sizes for i, sizes in layers.items()})
            elif layers:
                if stage in (0, 3):
                    name = f"zero_pp_rank_{data_rank}_mp_rank_{model_rank}_model_states.pt"
                share.model[name] = [size for sizes in layers.values() for size in sizes]
            if self.model.type != "transformer" and self.model.model_size_bytes and rank == 0:
                # The opaque state is not spread: it counts once in DLIO's size of a checkpoint.
                share.model[f"model_states-{rank}.pt"] = [self.model.model_size_bytes]
        groups = self._optimizer_bytes(data)
        if groups and (data_rank == 0 or stage > 0):
            name = f"zero_pp_rank_{data_rank}_mp_rank_{model_rank}_optim_states.pt"
            share.optimizer[name] = groups
        return share

    def _layers(self, stage: int, data: int) -> dict[int, list[int]]:
        """Array sizes of a pipeline stage's layers; 0 is the embedding, the last two are output and norm."""
        model, layers = self.model, max(self.model.num_layers, 0)
        each, more = divmod(layers, model.parallelism_pipeline)
        first = stage * each + min(stage, more) + 1
        last = first + each - 1 + (stage < more)
        tensor = model.parallelism_tensor
        if model.layer_parameters:
            given = [n // tensor for n in model.layer_parameters if n > 0]
            return dict.fromkeys(range(first, last + 1), given)
        if not layers:
            return {}
        spread = data if model.parallelism_zero_stage == 3 else 1
        hidden = model.transformer_hidden_size
        ends = [hidden * model.transformer_vocab_size // tensor // spread]
        # The two norms are not spread over tensor parallelism.
        inner = [n // (1 if n == hidden else tensor) // spread for n in self.layer_elements]
        elements = dict.fromkeys(range(first, last + 1), inner)
        if stage == 0:
            elements = {0: ends} | elements
        if stage == model.parallelism_pipeline - 1:
            elements |= {layers + 1: ends, layers + 2: [hidden // spread]}
        size = DATATYPE_BYTES[model.model_datatype]
        return {index: [n * size for n in counts if n > 0] for index, counts in elements.items()}

    def _optimizer_bytes(self, data: int) -> list[int]:
        model = self.model
        if model.optimization_groups:  # DLIO makes these of bytes
            groups = [n for n in model.optimization_groups if n > 0]
            return [each for n in groups for each in (n, n)] + [sum(groups)]
        copies = data if model.parallelism_zero_stage > 0 else 1
        each = self.parameters // (copies * self.copy_ranks)
        size = DATATYPE_BYTES[model.optimizer_datatype]
        return [each * size, 5 * model.transformer_hidden_size * size] * 3 if each > 0 else []
