"""Any causal language model of transformers, behind the forward pass that objectives expect."""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, masking_utils
from transformers.configuration_utils import PreTrainedConfig

from foundry.config.configured import configured_by
from foundry.config.schemas.model import HuggingFace as HuggingFaceSettings
from foundry.core.errors import ConfigError, Violation
from foundry.core.foreign import ForeignData
from foundry.models.documents import Documents
from foundry.models.flops import matmul_flops
from foundry.models.initialisation import draw_weights, matrix_draws, resolve_std
from foundry.models.keyed_draws import Draw
from foundry.models.kv_cache import Cache
from foundry.models.pretrained.base_files import check_weights
from foundry.models.pretrained.base_sizes import bounded_modules
from foundry.models.pretrained.config_dropout import put, set_dropouts
from foundry.models.pretrained.plain_head import has_plain_head
from foundry.models.pretrained.stored_types import REMEDY, find_wrong_types, folder_types
from foundry.models.pretrained.transformers_config import refuse_fields, refuse_folder, resolve_config
from foundry.models.token_log_probs import Read, TokenLogProbs, project_log_probs, read_log_probs
from foundry.models.token_loss import TokenLoss, project_loss, read_loss
from foundry.models.transformer import to_compute_dtype

_PREFIX = "causal_lm."
_OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
_ROUTER_LOGITS = "output_router_logits"
"""Field by which configs of mixtures of experts ask for the auxiliary loss that balances the experts."""


class HuggingFaceCausalLM(nn.Module):
    """A causal language model of transformers, with fresh weights or those of a local folder; weights are fp32.

    Args:
        settings: the folder or the architecture, the fields of its config, and how fresh weights are drawn.
        read_weights: take the folder's weights; False: they come from a checkpoint, and the folder has none.
        hidden_dropout: probability of dropping hidden states in training, see `set_dropouts`; None: as its config says.
        attention_dropout: probability of dropping attention weights; None: as its config says.
        logprob_tile_tokens: positions whose log-probabilities are computed at a time; 0: all.

    Raises:
        ConfigError: there is no such folder, architecture or field, or the vocabulary or the positions do not suffice,
            init_std does not know the architecture, or it has no such dropout.
    """

    @configured_by(HuggingFaceSettings)
    def __init__(
        self,
        settings: HuggingFaceSettings,
        *,
        read_weights: bool = True,
        hidden_dropout: float | None = None,
        attention_dropout: float | None = None,
        logprob_tile_tokens: int = 0,
    ) -> None:
        super().__init__()
        path, std, embedding_std = settings.path, settings.init_std, settings.embedding_init_std
        hf_config = resolve_config(
            path,
            settings.architecture,
            dict(settings.config or {}),
            vocab_size=settings.vocab_size,
            max_seq_len=settings.max_seq_len,
        )
        hf_config.use_cache = False
        self._asks_router_loss = bool(getattr(hf_config, _ROUTER_LOGITS, False))
        self._own_dtype = torch.float32 if path is None or hf_config.dtype is None else hf_config.dtype
        self._replaced = set_dropouts(hf_config, hidden_dropout=hidden_dropout, attention_dropout=attention_dropout)
        if self._asks_router_loss:  # nobody reads that loss, and with a cache transformers fails to compute it
            self._replaced[_ROUTER_LOGITS] = True
            setattr(hf_config, _ROUTER_LOGITS, False)
        self.config = hf_config
        self.causal_lm = _load(path, hf_config) if path is not None and read_weights else _build(path, hf_config)
        self._stds: tuple[float, float] | None = None
        if path is None and std is not None:
            self._set_stds(std, std if embedding_std is None else embedding_std)
            self.init_weights()
        for module in self.causal_lm.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_hook(_to_compute_dtype)
        self._takes = frozenset(inspect.signature(self.causal_lm.forward).parameters)
        self._has_plain_head = has_plain_head(self.causal_lm)
        self.max_seq_len = settings.max_seq_len
        self.logprob_tile_tokens = logprob_tile_tokens

    def output_head(self) -> nn.Module | None:
        """The projection onto the vocabulary; tied to the embedding it counts as that."""
        head: nn.Module | None = self.causal_lm.get_output_embeddings()  # type: ignore[no-untyped-call]
        return head

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        cache: "TransformersCache | None" = None,
        return_logits: bool = False,
        read: Read | None = None,
        per_token: Sequence[Tensor] = (),
        token_loss: TokenLoss | None = None,
        dropout_keys: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> TokenLogProbs:
        """Log-probabilities of the targets.

        Args:
            tokens: (batch, seq) int64.
            targets: (batch, seq) int64, the token after each position, -100 where ignored; None: only logits.
            cache: what was read before these tokens, from `new_cache`; they are added to it. There are no targets then,
                and the logits are those of the last position, (batch, 1, vocab).
            return_logits: also return the logits, (batch, seq, vocab).
            read: what else is read off them.
            per_token: (batch, seq, ...) each, what `read` is given besides.
            token_loss: the loss to sum; neither logits nor anything read off them are returned then.
            dropout_keys: unused: transformers draws from torch's generator, whose state is in checkpoints.
            documents: (batch, seq) int64, the sample of each token where rows hold several, -1 for padding; given
                neither mask nor cache, transformers separates them where positions start anew.
        """
        if cache is not None:
            logits = self.causal_lm(input_ids=tokens, **self._from_cache(cache, tokens)).logits[:, -1:]
            cache.advance(tokens.shape[1])
            return read_log_probs(logits, None)
        given = {} if documents is None else {"position_ids": Documents(documents).positions}
        if targets is not None and self._has_plain_head:
            asked: dict[str, Any] = {"return_logits": return_logits, "read": read, "per_token": per_token}
            return self._project(tokens, targets, given, token_loss, **asked)
        with nullcontext() if documents is not None else _one_document_a_row():
            logits = self.causal_lm(input_ids=tokens, use_cache=False, **given).logits
        if targets is not None and token_loss is not None:
            return read_loss(logits, targets, token_loss, tile_tokens=self.logprob_tile_tokens)
        return read_log_probs(
            logits,
            targets,
            tile_tokens=self.logprob_tile_tokens,
            return_logits=return_logits,
            read=read,
            per_token=per_token,
        )

    def training_warning(self) -> str | None:
        """Say that a mixture of experts is trained without the auxiliary loss for which its config asks."""
        if not self._asks_router_loss:
            return None
        return (
            f"the config of this {self.config.model_type} has {_ROUTER_LOGITS}=true but objectives here have no "
            "auxiliary loss of the router: nothing balances the experts while they are trained"
        )

    def new_cache(self, length: int, padding: Tensor | None = None) -> "TransformersCache | None":
        """An empty cache for `forward`, arguments as those of `Cache`; None where the architecture has another kind."""
        inner: Any = self.causal_lm
        if getattr(inner, "_is_stateful", False) or not inner._supports_default_dynamic_cache():
            return None
        return TransformersCache(self.config, length, padding)

    def _project(
        self,
        tokens: Tensor,
        targets: Tensor,
        given: dict[str, Any],
        token_loss: TokenLoss | None,
        **asked: Any,
    ) -> TokenLogProbs:
        """As `forward`, of a model whose logits are the product of its last hidden states with the head."""
        base: Any = self.causal_lm.base_model
        with nullcontext() if given else _one_document_a_row():
            hidden = base(input_ids=tokens, use_cache=False, **given).last_hidden_state
        head: Any = self.output_head()
        if token_loss is not None:
            return project_loss(hidden, head.weight, targets, token_loss, tile_tokens=self.logprob_tile_tokens)
        return project_log_probs(hidden, head.weight, targets, tile_tokens=self.logprob_tile_tokens, **asked)

    def _from_cache(self, cache: "TransformersCache", tokens: Tensor) -> dict[str, Any]:
        """What transformers is given besides tokens, where it has read others before them."""
        batch, seq_len = tokens.shape
        given: dict[str, Any] = {"past_key_values": cache.held, "use_cache": True}
        if cache.padding is not None:
            columns = torch.arange(cache.filled + seq_len, device=tokens.device)
            given["attention_mask"] = (columns >= cache.padding[:, None]).long()
        if "position_ids" in self._takes:
            given["position_ids"] = cache.positions(batch, seq_len, tokens.device)
        if "logits_to_keep" in self._takes:
            given["logits_to_keep"] = 1
        return given

    def get_fsdp_block_types(self) -> tuple[type[nn.Module], ...]:
        """The types transformers says not to split; failing that, that of the first list of modules."""
        names = set(getattr(self.causal_lm, "_no_split_modules", None) or ())
        types = {type(module) for module in self.causal_lm.modules() if type(module).__name__ in names}
        if not types:
            lists = (m for m in self.causal_lm.modules() if isinstance(m, nn.ModuleList) and len(m))
            types = {type(block) for block in next(lists, ())}
        return tuple(sorted(types, key=lambda t: t.__name__))

    def flops_per_sample(self, seq_len: int) -> float:
        """FLOPs of a forward and backward pass over one sequence of seq_len tokens.

        Per token 6 N + 12 L H Q T (PaLM, Chowdhery et al., 2022, appendix B), as for `Transformer`, 4 N where frozen.
        Of a mixture of experts all are counted, also those that a token does not visit. A recurrent layer has no such
        second term, and the scan over its state, a few per cent of its products, is not counted.
        """
        config: Any = self.config
        attention = 0
        if heads := getattr(config, "num_attention_heads", 0):  # a model of recurrent layers alone names none
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
            attention = 12 * _attention_layers(config) * heads * head_dim * seq_len
        return float(seq_len * (matmul_flops(_matmul_weights(self.causal_lm)) + attention))

    def initial_weights(self) -> dict[str, Draw] | None:
        """How weights are drawn from scratch; None: by the architecture itself, or they are those of a folder."""
        return None if self._stds is None else matrix_draws(self, std=self._stds[0], embedding_std=self._stds[1])

    def init_weights(self, seed: int | None = None) -> None:
        """Draw the weights that `initial_weights` names; `seed` as for `draw_weights`."""
        draw_weights(self, self.initial_weights() or {}, seed)

    def _set_stds(self, init_std: float | str, embedding_init_std: float | str) -> None:
        config: Any = self.config
        std = resolve_std(init_std, config.hidden_size)
        self._stds = std, resolve_std(embedding_init_std, config.hidden_size)
        # OPT and a few others have the second name.
        for name in ("initializer_range", "init_std"):
            if hasattr(config, name):
                setattr(config, name, std)

    def hf_config(self) -> PreTrainedConfig:
        """The transformers config that `export_state` fits; for use, so with the key-value cache on."""
        config = copy.deepcopy(self.config)
        config.use_cache = True
        config.architectures = [type(self.causal_lm).__name__]
        config.dtype = self._own_dtype
        for name, value in self._replaced.items():
            put(config, name, value)
        return config

    def export_state(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """This model's state under transformers' names, a tied matrix once."""
        tied: dict[str, str] = self.causal_lm.all_tied_weights_keys
        named = {name.removeprefix(_PREFIX): value for name, value in state_dict.items()}
        return {name: value for name, value in named.items() if name not in tied}

    def import_name(self, name: str) -> str:
        """This model's name of a tensor that `export_state` or transformers calls `name`."""
        return f"{_PREFIX}{name}"


class TransformersCache(Cache):
    """A cache of transformers' own, which knows of sliding windows and other kinds of layers.

    Args:
        config: of the model.
        length: columns at most.
        padding: as in `Cache`.
    """

    def __init__(self, config: PreTrainedConfig, length: int, padding: Tensor | None = None) -> None:
        super().__init__(length, padding)
        self.held = DynamicCache(config=config)

    def _keep(self, rows: Tensor) -> None:
        self.held.batch_select_indices(rows)


@contextmanager
def _one_document_a_row() -> Iterator[None]:
    """Meanwhile transformers takes it for granted that positions count from the first token to the last.

    Where it has neither mask nor cache it compares them, to find rows of several documents, and a device is waited for
    in every forward pass to know the answer. It can go when `masking_utils` can be told.
    """
    look = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = look


def _to_compute_dtype(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return to_compute_dtype(output)


def _build(path: str | None, config: PreTrainedConfig) -> PreTrainedModel:
    build: Any = AutoModelForCausalLM.from_config
    refuse: Callable[[str], ConfigError] = refuse_fields if path is None else partial(refuse_folder, path)
    with ForeignData(refuse, *_OUT_OF_MEMORY), bounded_modules():
        model: PreTrainedModel = build(config, dtype=torch.float32, trust_remote_code=False)
    return model


def _load(path: str, config: PreTrainedConfig) -> PreTrainedModel:
    check_weights(Path(path).expanduser(), config)
    if isinstance(torch.empty(0), FakeTensor):
        return _without_weights(path, config)
    load: Any = AutoModelForCausalLM.from_pretrained
    model: PreTrainedModel
    with ForeignData(partial(refuse_folder, path), *_OUT_OF_MEMORY), bounded_modules():
        types = folder_types(Path(path).expanduser())
        model, loading = load(
            str(Path(path).expanduser()),
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,  # any other file of weights is unpickled
            output_loading_info=True,
        )
    if missing := sorted(loading["missing_keys"]):
        message = f"{path!r} lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]}"
        raise ConfigError(Violation("model.path", message))
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    if wrong := find_wrong_types(types, loading["unexpected_keys"], ignored, _integral_buffers(model)):
        raise ConfigError(Violation("model.path", f"{path!r} {wrong}; {REMEDY}"))
    return model


def _integral_buffers(model: PreTrainedModel) -> set[str]:
    """Buffers without fractions by the names that a folder may have for them, with and without the inner model's."""
    names = {name for name, buffer in model.named_buffers() if not buffer.dtype.is_floating_point}
    return names | {name.removeprefix(f"{model.base_model_prefix}.") for name in names}


def _without_weights(path: str, config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a folder for a plan, which reads no weights: nothing is known of their values."""
    model = _build(path, config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.empty_like(parameter))
    return model


def _attention_layers(config: Any) -> int:
    """How many of the layers attend; hybrids list the kind of each, recurrent ones under other names."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return sum(kind == "hybrid" or ("attention" in kind and kind != "linear_attention") for kind in kinds)


def _matmul_weights(model: PreTrainedModel) -> list[nn.Parameter]:
    """Those of matrix products: all matrices but embeddings, and the head though it be tied to one."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.ndim >= 2 and p not in embeddings]
    output_embeddings: Any = model.get_output_embeddings
    head = output_embeddings().weight
    return [*matrices, head] if head in embeddings else matrices
