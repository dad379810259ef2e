"""Wrapper that gives any causal language model of transformers the forward pass that objectives expect."""

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
from transformers import AutoModelForCausalLM, PreTrainedModel, masking_utils
from transformers.configuration_utils import PreTrainedConfig

from foundry.config.configured import configured_by
from foundry.config.schemas.model import HuggingFace as HuggingFaceSettings
from foundry.core.errors import ConfigError, Violation, counted
from foundry.core.foreign import ForeignData
from foundry.models.attention.documents import Documents
from foundry.models.compute_dtype import to_compute_dtype
from foundry.models.flops import matmul_flops
from foundry.models.initialisation import draw_weights, matrix_draws, resolve_std
from foundry.models.keyed_draws import Draw
from foundry.models.pretrained.base_files import check_weights
from foundry.models.pretrained.base_sizes import bounded_modules
from foundry.models.pretrained.config_dropout import put, set_dropouts
from foundry.models.pretrained.plain_head import has_plain_head
from foundry.models.pretrained.stored_types import REMEDY, find_wrong_types, folder_types
from foundry.models.pretrained.transformers_cache import TransformersCache
from foundry.models.pretrained.transformers_config import refuse_fields, refuse_folder, resolve_config
from foundry.models.token_log_probs import Read, TokenLogProbs, project_log_probs, read_log_probs
from foundry.models.token_loss import TokenLoss, project_loss, read_loss

_PREFIX = "causal_lm."
_OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
_ROUTER_LOGITS = "output_router_logits"
"""Config field that enables the auxiliary loss that balances the experts of a mixture-of-experts model."""


class HuggingFaceCausalLM(nn.Module):
    """A causal language model of transformers with fp32 weights, newly initialized or read from a local folder.

    Args:
        settings: the folder or the architecture, the fields of its config, and the initialization of new weights.
        read_weights: read the folder's weights; False if a checkpoint has the weights, so that the folder needs none.
        hidden_dropout: dropout probability of hidden states, see `set_dropouts`; None keeps the config's value.
        attention_dropout: dropout probability of attention weights; None keeps the config's value.
        logprob_tile_tokens: positions whose log-probabilities are computed at a time; 0 computes all at once.

    Raises:
        ConfigError: the folder, architecture or config field does not exist; the vocabulary or the number of positions
            is too small; init_std does not support the architecture; or a dropout is given that the architecture does
            not have.
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
        self._computes_router_loss = bool(getattr(hf_config, _ROUTER_LOGITS, False))
        self._stored_dtype = torch.float32 if path is None or hf_config.dtype is None else hf_config.dtype
        self._original_values = set_dropouts(
            hf_config, hidden_dropout=hidden_dropout, attention_dropout=attention_dropout
        )
        # The auxiliary loss of the router is not used, and transformers fails to compute it with a cache.
        if self._computes_router_loss:
            self._original_values[_ROUTER_LOGITS] = True
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
        self._forward_parameters = frozenset(inspect.signature(self.causal_lm.forward).parameters)
        self._has_plain_head = has_plain_head(self.causal_lm)
        self.max_seq_len = settings.max_seq_len
        self.logprob_tile_tokens = logprob_tile_tokens

    def output_head(self) -> nn.Module | None:
        """Return the projection onto the vocabulary, even if it is tied to the embedding."""
        head: nn.Module | None = self.causal_lm.get_output_embeddings()  # type: ignore[no-untyped-call]
        return head

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        cache: TransformersCache | None = None,
        return_logits: bool = False,
        read: Read | None = None,
        per_token: Sequence[Tensor] = (),
        token_loss: TokenLoss | None = None,
        dropout_keys: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> TokenLogProbs:
        """Return the log-probabilities of the targets.

        Args:
            tokens: (batch, seq) int64.
            targets: (batch, seq) int64, the token after each position, -100 where ignored; None computes only logits.
            cache: cache of the preceding tokens, from `new_cache`; these tokens are appended to it. Targets must be
                None, and the logits cover the last position only, (batch, 1, vocab).
            return_logits: also return the logits, (batch, seq, vocab).
            read: function that computes further values from the logits.
            per_token: (batch, seq, ...) each, further arguments of `read`.
            token_loss: settings of the loss to compute; logits and the outputs of `read` are not returned then.
            dropout_keys: unused: transformers uses torch's default generator, whose state is saved in checkpoints.
            documents: (batch, seq) int64, index of each token's sample in packed rows, -1 for padding. Without a mask
                and a cache, transformers separates documents at positions that restart.
        """
        if cache is not None:
            logits = self.causal_lm(input_ids=tokens, **self._from_cache(cache, tokens)).logits[:, -1:]
            cache.advance(tokens.shape[1])
            return read_log_probs(logits, None)
        inputs = {} if documents is None else {"position_ids": Documents(documents).positions}
        if targets is not None and self._has_plain_head:
            output_options: dict[str, Any] = {"return_logits": return_logits, "read": read, "per_token": per_token}
            return self._project(tokens, targets, inputs, token_loss, **output_options)
        with nullcontext() if documents is not None else _ignore_packing():
            logits = self.causal_lm(input_ids=tokens, use_cache=False, **inputs).logits
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
        """Return a warning if a mixture of experts is trained without the auxiliary loss that its config enables."""
        if not self._computes_router_loss:
            return None
        return (
            f"the config of this {self.config.model_type} has {_ROUTER_LOGITS}=true but foundry's objectives have "
            "no auxiliary loss for the router: nothing balances the experts during training"
        )

    def new_cache(self, length: int, padding: Tensor | None = None) -> TransformersCache | None:
        """Return an empty cache for `forward`; None if the architecture needs another kind of cache.

        The arguments are as for `Cache`.
        """
        inner: Any = self.causal_lm
        if getattr(inner, "_is_stateful", False) or not inner._supports_default_dynamic_cache():
            return None
        return TransformersCache(self.config, length, padding)

    def _project(
        self,
        tokens: Tensor,
        targets: Tensor,
        inputs: dict[str, Any],
        token_loss: TokenLoss | None,
        **output_options: Any,
    ) -> TokenLogProbs:
        """Return the output of `forward` for models whose logits are the last hidden states times the head's matrix."""
        base: Any = self.causal_lm.base_model
        with nullcontext() if inputs else _ignore_packing():
            hidden = base(input_ids=tokens, use_cache=False, **inputs).last_hidden_state
        head: Any = self.output_head()
        if token_loss is not None:
            return project_loss(hidden, head.weight, targets, token_loss, tile_tokens=self.logprob_tile_tokens)
        return project_log_probs(hidden, head.weight, targets, tile_tokens=self.logprob_tile_tokens, **output_options)

    def _from_cache(self, cache: TransformersCache, tokens: Tensor) -> dict[str, Any]:
        """Return the keyword arguments that transformers needs to continue from a cache."""
        batch, seq_len = tokens.shape
        inputs: dict[str, Any] = {"past_key_values": cache.layers_cache, "use_cache": True}
        if cache.padding is not None:
            columns = torch.arange(cache.filled + seq_len, device=tokens.device)
            inputs["attention_mask"] = (columns >= cache.padding[:, None]).long()
        if "position_ids" in self._forward_parameters:
            inputs["position_ids"] = cache.positions(batch, seq_len, tokens.device)
        if "logits_to_keep" in self._forward_parameters:
            inputs["logits_to_keep"] = 1
        return inputs

    def get_fsdp_block_types(self) -> tuple[type[nn.Module], ...]:
        """Return the block types, for sharding, checkpointing and compiling.

        These are the types in transformers' `_no_split_modules`, or if there are none, the types of the modules in the
        first ModuleList that is not empty.
        """
        names = set(getattr(self.causal_lm, "_no_split_modules", None) or ())
        types = {type(module) for module in self.causal_lm.modules() if type(module).__name__ in names}
        if not types:
            lists = (m for m in self.causal_lm.modules() if isinstance(m, nn.ModuleList) and len(m))
            types = {type(block) for block in next(lists, ())}
        return tuple(sorted(types, key=lambda t: t.__name__))

    def flops_per_sample(self, seq_len: int) -> float:
        """Return the FLOPs of a forward and backward pass over one sequence of seq_len tokens.

        Per token 6 N + 12 L H Q T (PaLM, Chowdhery et al., 2022, appendix B), as for `Transformer`, with 4 N instead of
        6 N for frozen weights. All experts of a mixture count, including experts that a token is not routed to.
        Recurrent layers do not have the second term. The scan over their state is not counted; it costs a few per cent
        of their matrix products.
        """
        config: Any = self.config
        attention = 0
        if heads := getattr(config, "num_attention_heads", 0):  # undefined if all layers are recurrent
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
            attention = 12 * _attention_layers(config) * heads * head_dim * seq_len
        return float(seq_len * (matmul_flops(_matmul_weights(self.causal_lm)) + attention))

    def initial_weights(self) -> dict[str, Draw] | None:
        """Return the initialization by parameter name.

        None if the architecture initializes itself or weights come from a folder.
        """
        return None if self._stds is None else matrix_draws(self, std=self._stds[0], embedding_std=self._stds[1])

    def init_weights(self, seed: int | None = None) -> None:
        """Initialize the weights listed by `initial_weights`; `seed` as for `draw_weights`."""
        draw_weights(self, self.initial_weights() or {}, seed)

    def _set_stds(self, init_std: float | str, embedding_init_std: float | str) -> None:
        config: Any = self.config
        std = resolve_std(init_std, config.hidden_size)
        self._stds = std, resolve_std(embedding_init_std, config.hidden_size)
        # OPT and a few other architectures call this field `init_std`.
        for name in ("initializer_range", "init_std"):
            if hasattr(config, name):
                setattr(config, name, std)

    def hf_config(self) -> PreTrainedConfig:
        """Return the transformers config for the weights of `export_state`, with the key-value cache enabled."""
        config = copy.deepcopy(self.config)
        config.use_cache = True
        config.architectures = [type(self.causal_lm).__name__]
        config.dtype = self._stored_dtype
        for name, value in self._original_values.items():
            put(config, name, value)
        return config

    def export_state(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the state dict under transformers' parameter names; tied matrices are included once."""
        tied_names: dict[str, str] = self.causal_lm.all_tied_weights_keys
        tensors = {name.removeprefix(_PREFIX): value for name, value in state_dict.items()}
        return {name: value for name, value in tensors.items() if name not in tied_names}

    def import_name(self, name: str) -> str:
        """Return this model's name of the tensor that `export_state` and transformers call `name`."""
        return f"{_PREFIX}{name}"


@contextmanager
def _ignore_packing() -> Iterator[None]:
    """Make transformers assume, inside the context, that every row holds one document.

    Without a mask and a cache, transformers compares positions to detect packed rows, which synchronizes with the
    device in every forward pass. This workaround can go once `masking_utils` has an option to skip the check.
    """
    find_indices = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find_indices


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
            use_safetensors=True,  # any other weight file would be unpickled
            output_loading_info=True,
        )
    if missing := sorted(loading["missing_keys"]):
        message = f"{path!r} lacks {counted(len(missing), 'weight')} of {type(model).__name__}, such as {missing[0]}"
        raise ConfigError(Violation("model.path", message))
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    if problem := find_wrong_types(types, loading["unexpected_keys"], ignored, _integral_buffers(model)):
        raise ConfigError(Violation("model.path", f"{path!r} {problem}; {REMEDY}"))
    return model


def _integral_buffers(model: PreTrainedModel) -> set[str]:
    """Return the names of integer buffers as a folder may store them, with and without the prefix of the base model."""
    names = {name for name, buffer in model.named_buffers() if not buffer.dtype.is_floating_point}
    return names | {name.removeprefix(f"{model.base_model_prefix}.") for name in names}


def _without_weights(path: str, config: PreTrainedConfig) -> PreTrainedModel:
    """Build the model of a folder on fake tensors, for a plan; its weights are not read."""
    model = _build(path, config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.empty_like(parameter))
    return model


def _attention_layers(config: Any) -> int:
    """Count the layers with attention.

    Hybrid models list the kind of each layer; recurrent layers have kinds without attention, or `linear_attention`.
    """
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return sum(kind == "hybrid" or ("attention" in kind and kind != "linear_attention") for kind in kinds)


def _matmul_weights(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the weights of matrix products: all matrices except embeddings, and the head even if it is tied."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.ndim >= 2 and p not in embeddings]
    output_embeddings: Any = model.get_output_embeddings
    head = output_embeddings().weight
    return [*matrices, head] if head in embeddings else matrices
