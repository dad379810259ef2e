"""`DataSplits`, the result of building a data part: datasets, prompts, tokenizer and their metadata."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, cast

from torch import Tensor

from foundry.data.dataset import Dataset, Samples, as_dataset
from foundry.data.mixture import Mixture, MixtureOrder
from foundry.data.order import GlobalOrder


class _DatasetField:
    """Descriptor that accepts samples of any class and returns them as a `Dataset`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Dataset:
        if instance is None:  # `dataclass` asks the class for a default; this field has none
            raise AttributeError(self._name)
        return cast(Dataset, vars(instance)[self._name])

    def __set__(self, instance: object, samples: Samples) -> None:
        vars(instance)[self._name] = as_dataset(samples)


class RunFile(Protocol):
    """Metadata of the dataset that the run directory keeps in a file, such as normalization statistics.

    Each implementation is registered in `foundry.core.tasks.Task.run_files`, and has a class method `from_json(text)`,
    which raises ValueError, with the reason, if the text is invalid.
    """

    overrides: ClassVar[tuple[str, ...]]
    """Overrides that a run with this file applies when it composes other data, for example for an evaluation."""

    def to_json(self) -> str:
        """Return the metadata as JSON that `from_json` reads back exactly."""
        ...

    def applied_to(self, data: "DataSplits") -> "DataSplits":
        """Return `data` preprocessed with this metadata, such as the normalization statistics of the run.

        Raises:
            ConfigError: the data does not fit this run.
        """
        ...


class Prompt(NamedTuple):
    """A prompt with its reference answer, if known.

    Attributes:
        tokens: token ids of the prompt, which the model continues.
        answer: reference text for the completion; None if unknown.
        row: unique id of the prompt; random numbers for completions of the prompt are keyed by this id.
        columns: columns of the prompt's row, by name; None if the row has only an answer.
        turn: index of the first token after the previous answer in the loss (usually the last user turn); 0 if none.
        images: images of the prompt, (images, 3, image_size, image_size) uint8; None for text only.
    """

    tokens: tuple[int, ...]
    answer: str | None
    row: int
    columns: Mapping[str, Any] | None = None
    turn: int = 0
    images: Tensor | None = None

    @property
    def own_columns(self) -> Mapping[str, Any]:
        """Columns of the row that environments receive; only `answer` if `columns` is None."""
        return {"answer": self.answer} if self.columns is None else self.columns


@dataclass(frozen=True, kw_only=True)
class DataSplits:
    """Training and validation splits of a dataset, with their metadata.

    Attributes:
        train: training samples: a `Dataset`, or any object with `len()` whose items are dicts of tensors.
        validation: validation samples, of the same types.
        fingerprint: hash of the samples and their order in the dataset; it seeds the sample order of a run.
        tokens_per_sample: tokens of a sample, the mean if lengths differ; None if samples are not token sequences.
        max_tokens: maximum tokens of a sample, or of a prompt with its completion; None if it is `tokens_per_sample`.
        tokenizer: a `tokenizers.Tokenizer`; None if the data has no text, or is token files without a tokenizer.
        notes: statistics for plan.json, such as the unigram entropy of the validation text.
        prompts: validation prompts, most of them with answers; empty if the data has no prompts.
        train_prompts: training prompts, one for each training sample; empty if the data has no prompts to train on.
        stop_ids: tokens that end a document or an answer, the end of a document first; empty without a tokenizer.
        bos_id: beginning-of-sequence token of the chat template, or None.
        kept: metadata by the name of its file in the run directory, so that the run can be opened without its data.
        class_names: names of the classes, by class index; empty if classes have no names.
        chat_template: Jinja source as in transformers, for chat data; None if the model continues plain text.
        mixture: mixture of the training samples if sources have weights; None otherwise.
        content: like the fingerprint, but independent of file names; None if it equals the fingerprint.
    """

    train: _DatasetField = _DatasetField()
    validation: _DatasetField = _DatasetField()
    fingerprint: str
    tokens_per_sample: int | None = None
    max_tokens: int | None = None
    tokenizer: Any = None
    notes: dict[str, Any] | None = None
    content: str | None = None
    prompts: Sequence[Prompt] = ()
    train_prompts: Sequence[Prompt] = ()
    stop_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    chat_template: str | None = None
    kept: Mapping[str, RunFile] = field(default_factory=dict)
    class_names: Sequence[str] = ()
    mixture: Mixture | None = None

    def order(self, seed: int) -> GlobalOrder:
        """Return the order of the training samples for a run with this seed."""
        if self.mixture is not None:
            return MixtureOrder(self.mixture, fingerprint=self.fingerprint, seed=seed)
        return GlobalOrder(num_samples=len(self.train), fingerprint=self.fingerprint, seed=seed)

    def encode_prompt(self, text: str, *, as_chat: bool = True) -> list[int]:
        """Return the token ids of a prompt, without the special tokens that the tokenizer adds by default.

        Args:
            text: prompt text; for a chat, the user's message.
            as_chat: render the text with the chat template, if there is one.

        Raises:
            ConfigError: the tokenizer fails on the text.
            ValueError: the chat template rejects the text.
        """
        from foundry.data.corpora.tokenizer import encode_texts

        if as_chat and self.chat_template is not None:
            from foundry.data.conversations.chat import ChatTemplate

            first = {"bos_token": self.bos_id, "eos_token": next(iter(self.stop_ids), None)}
            variables = {name: "" if id is None else self.tokenizer.id_to_token(id) for name, id in first.items()}
            text = ChatTemplate(self.chat_template, variables).render(
                [{"role": "user", "content": text}], for_answer=True
            )
        return encode_texts(self.tokenizer, [text])[0]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens.

        Raises:
            ConfigError: the tokenizer fails on the tokens.
        """
        from foundry.data.corpora.tokenizer import decode_tokens

        return decode_tokens(self.tokenizer, tokens)

    def identity(self) -> dict[str, Any]:
        """Return the data's identity for a checkpoint: content, order, number of samples and hash of the tokenizer."""
        text = getattr(self.tokenizer, "to_str", lambda: None)()
        return {
            "content": self.fingerprint if self.content is None else self.content,
            "order": self.fingerprint,
            "samples": len(self.train),
            "tokenizer": None if text is None else hashlib.sha256(text.encode()).hexdigest(),
        }
