"""ModelSpec: how large a checkpoint is, and which rank writes which arrays of it, as DLIO has it.

A pure function of a workload's `model` section and of the number of ranks: model and optimizer states of a
transformer over tensor, pipeline and data parallelism and the stages of ZeRO, or one opaque blob.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DATATYPES", "ModelSpec", "Parallelism", "RankShare", "Transformer"]

DATATYPES = {"int8": 1, "uint8": 1, "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
"""DLIO's names of element types, and their bytes."""


def _whole(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"model.{name} is {value!r}, expected a whole number of at least {low}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """`model.transformer`.

    Raises:
        ValueError: a value makes no sense.
    """

    vocab_size: int = 32000
    hidden_size: int = 2048
    ffn_hidden_size: int = 8192
    num_attention_heads: int = 32
    num_kv_heads: int = 8

    def __post_init__(self) -> None:
        for name in self.__slots__:
            _whole(f"transformer.{name}", getattr(self, name), 1)

    @property
    def kv_columns(self) -> int:
        """Columns of the K and V matrices, with DLIO's whole division."""
        return self.hidden_size // self.num_attention_heads * self.num_kv_heads

    def layer(self) -> list[int]:
        """Elements of the arrays of a layer: norm, attention, its output, norm, two of the MLP."""
        h, ffn = self.hidden_size, self.ffn_hidden_size
        return [h, h * (h + 2 * self.kv_columns), h * h, h, 2 * h * ffn, h * ffn]

    def parameters(self, layers: int) -> int:
        """Elements of the whole model: embedding, layers, final norm, output."""
        ends = 2 * self.vocab_size * self.hidden_size + self.hidden_size
        return ends + layers * sum(self.layer())


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """`model.parallelism`.

    Raises:
        ValueError: a value makes no sense.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = -1
    """-1: as many as there are ranks for. Given, a run with fewer ranks writes a subset."""
    zero_stage: int = 0

    def __post_init__(self) -> None:
        _whole("parallelism.tensor", self.tensor, 1)
        _whole("parallelism.pipeline", self.pipeline, 1)
        if self.data != -1:
            _whole("parallelism.data", self.data, 1)
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(
                f"model.parallelism.zero_stage is {self.zero_stage!r}, expected 0, 1, 2 or 3"
            )
        if self.pipeline > 1 and self.zero_stage == 3:
            raise ValueError("model.parallelism: ZeRO stage 3 cannot go with pipeline parallelism")

    @property
    def model(self) -> int:
        """Ranks that one copy of the model is spread over."""
        return self.tensor * self.pipeline


@dataclass(frozen=True, slots=True)
class RankShare:
    """What a rank writes: file name to the sizes of its arrays, in bytes."""

    model: dict[str, list[int]]
    optimizer: dict[str, list[int]]

    @property
    def model_bytes(self) -> int:
        """Of the model's states."""
        return sum(map(sum, self.model.values()))

    @property
    def optimizer_bytes(self) -> int:
        """Of the optimizer's."""
        return sum(map(sum, self.optimizer.values()))

    @property
    def nbytes(self) -> int:
        """Of both."""
        return self.model_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """`model` of a workload.

    Raises:
        ValueError: a value makes no sense; says the field, what was found and what was expected.
    """

    type: str | None = None
    """`transformer`: sized by its layers alone. Anything else has `model_size_bytes` of opaque state, too."""
    model_size_bytes: int = 10240
    model_datatype: str = "fp16"
    optimizer_datatype: str = "fp32"
    num_layers: int = -1
    optimization_groups: tuple[int, ...] = ()
    """Elements of a rank's optimizer arrays, instead of what follows from the transformer."""
    layer_parameters: tuple[int, ...] = ()
    """Elements of each layer's arrays, likewise; spread over tensor parallelism."""
    parallelism: Parallelism = field(default_factory=Parallelism)
    transformer: Transformer = field(default_factory=Transformer)

    def __post_init__(self) -> None:
        for name in ("model_datatype", "optimizer_datatype"):
            if getattr(self, name) not in DATATYPES:
                raise ValueError(
                    f"model.{name} is {getattr(self, name)!r}, expected one of {', '.join(DATATYPES)}"
                )
        _whole("model_size_bytes", self.model_size_bytes, 0)
        if 0 < self.num_layers < self.parallelism.pipeline:
            raise ValueError(
                f"model.num_layers is {self.num_layers}, expected at least "
                f"model.parallelism.pipeline {self.parallelism.pipeline}"
            )

    @property
    def parameters(self) -> int:
        """Elements of the whole model; 0 without layers."""
        return self.transformer.parameters(self.num_layers) if self.num_layers > 0 else 0

    def data_parallelism(self, world_size: int) -> int:
        """Copies of the model.

        Raises:
            ValueError: the ranks do not make whole copies.
        """
        model, data = self.parallelism.model, self.parallelism.data
        if data > 0:
            if world_size > model * data:
                raise ValueError(
                    f"{world_size} ranks are more than tensor x pipeline x data = {model * data}"
                )
            return data
        if world_size % model:
            raise ValueError(
                f"{world_size} ranks are no multiple of tensor x pipeline parallelism {model}"
            )
        return world_size // model

    def share(self, rank: int, world_size: int) -> RankShare:
        """What a rank writes.

        Without ZeRO the first copy of the model writes all; with ZeRO 1 and 2 it writes the model and each
        rank its part of the optimizer; with ZeRO 3 each rank its part of both.
        """
        data = self.data_parallelism(world_size)
        model_rank, data_rank = rank % self.parallelism.model, rank // self.parallelism.model
        stage = self.parallelism.zero_stage
        model: dict[str, list[int]] = {}
        if data_rank == 0 or stage == 3:
            model = dict(self._model_files(rank, model_rank, data_rank, data))
        optimizer: dict[str, list[int]] = {}
        groups = self._optimizer_elements(data)
        if groups and (data_rank == 0 or stage > 0):
            size = DATATYPES[self.optimizer_datatype]
            if self.optimization_groups:
                size = 1  # DLIO makes these of bytes
            name = f"zero_pp_rank_{data_rank}_mp_rank_{model_rank}_optim_states.pt"
            optimizer[name] = [n * size for n in groups]
        return RankShare(model, optimizer)

    def total_bytes(self, world_size: int) -> int:
        """Of the whole checkpoint, over the ranks that write it."""
        return sum(self.share(rank, world_size).nbytes for rank in range(world_size))

    def _model_files(
        self, rank: int, model_rank: int, data_rank: int, data: int
    ) -> Iterator[tuple[str, list[int]]]:
        layers = list(self._layers(model_rank // self.parallelism.tensor, data))
        stage = self.parallelism.zero_stage
        if layers and self.parallelism.pipeline > 1:
            for index, sizes in layers:
                yield f"layer_{index}-model_{model_rank}_model_states.pt", sizes
        elif layers:
            name = f"model_{model_rank}_model_states.pt"
            if stage in (0, 3):
                name = f"zero_pp_rank_{data_rank}_mp_rank_{model_rank}_model_states.pt"
            yield name, [size for _, sizes in layers for size in sizes]
        if self.type != "transformer" and self.model_size_bytes and rank == 0:
            # The opaque state is not spread: it counts once in DLIO's size of a checkpoint.
            yield f"model_states-{rank}.pt", [self.model_size_bytes]

    def _layers(self, stage: int, data: int) -> Iterator[tuple[int, list[int]]]:
        """The layers of a pipeline stage; 0 is the embedding, the last two are output and norm."""
        first, last = self._range(stage)
        size = DATATYPES[self.model_datatype]
        for index in range(first, last + 1):
            if self.layer_parameters:
                yield index, [n // self.parallelism.tensor for n in self.layer_parameters if n > 0]
            elif self.num_layers > 0:
                elements = self._layer_elements(index, data)
                yield index, [n * size for n in elements if n > 0]

    def _range(self, stage: int) -> tuple[int, int]:
        stages, layers = self.parallelism.pipeline, max(self.num_layers, 0)
        each, more = divmod(layers, stages)
        first = stage * each + min(stage, more) + 1
        last = first + each - 1 + (stage < more)
        if self.layer_parameters or not layers:
            return first, last
        return (0 if stage == 0 else first), (layers + 2 if stage == stages - 1 else last)

    def _layer_elements(self, index: int, data: int) -> list[int]:
        tensor, spread = self.parallelism.tensor, data if self.parallelism.zero_stage == 3 else 1
        model = self.transformer
        if index in (0, self.num_layers + 1):
            return [model.hidden_size * model.vocab_size // tensor // spread]
        if index == self.num_layers + 2:
            return [model.hidden_size // spread]
        # The two norms are not spread over tensor parallelism.
        return [
            n // spread if n == model.hidden_size else n // tensor // spread for n in model.layer()
        ]

    def _optimizer_elements(self, data: int) -> list[int]:
        if self.optimization_groups:
            groups = [n for n in self.optimization_groups if n > 0]
            return [each for n in groups for each in (n, n)] + [sum(groups)]
        if self.num_layers <= 0:
            return []
        copies = data if self.parallelism.zero_stage > 0 else 1
        each = self.parameters // (copies * self.parallelism.model)
        return [each, 5 * self.transformer.hidden_size] * 3 if each > 0 else []
