"""What a data part hands to the run."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, cast

from torch import Tensor

from foundry.data.dataset import Dataset, Samples, as_dataset
from foundry.data.mixture import Mixture, MixtureOrder
from foundry.data.order import GlobalOrder


class _DatasetField:
    """A field that is given samples of any class, and is a `Dataset` of them."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Dataset:
        if instance is None:  # the field has no default
            raise AttributeError(self._name)
        return cast(Dataset, vars(instance)[self._name])

    def __set__(self, instance: object, samples: Samples) -> None:
        vars(instance)[self._name] = as_dataset(samples)


class RunFile(Protocol):
    """Values of the data that a run directory keeps in a file, such as those by which samples are normalised.

    The class is named in `foundry.core.tasks.Task.run_files` and has `from_json(text)`, which raises a ValueError that
    says what is wrong with a file.
    """

    overrides: ClassVar[tuple[str, ...]]
    """With which other data is composed for a run that has such a file."""

    def to_json(self) -> str:
        """As a text that `from_json` reads back bit for bit."""
        ...

    def applied_to(self, data: "DataSplits") -> "DataSplits":
        """Other data as this run reads it.

        Raises:
            ConfigError: it does not fit.
        """
        ...


class Prompt(NamedTuple):
    """A prompt and the answer that is right.

    Attributes:
        tokens: of the prompt, as the model is to continue them.
        answer: the text that a continuation is compared with; None: it is not known.
        row: tells it from the others; what is drawn for it is keyed by this.
        columns: of its row, by name; None: the answer is all that there is.
        turn: where in the tokens what is asked last begins.
        images: that it is about, (pictures, 3, image_size, image_size) uint8; None: it is about none.
    """

    tokens: tuple[int, ...]
    answer: str | None
    row: int
    columns: Mapping[str, Any] | None = None
    turn: int = 0
    images: Tensor | None = None

    @property
    def own_columns(self) -> Mapping[str, Any]:
        """What an environment is told of the row."""
        return {"answer": self.answer} if self.columns is None else self.columns


@dataclass(frozen=True, kw_only=True)
class DataSplits:
    """Training and held-out samples.

    Attributes:
        train: samples to learn from: a `Dataset`, or anything with `len()` and an index that gives a dict of tensors.
        validation: likewise, held out.
        fingerprint: changes whenever the samples or their order in the dataset do; the order of a run is drawn from it.
        tokens_per_sample: tokens in one sample, the mean where lengths differ; None where samples are not sequences of
            tokens.
        max_tokens: most tokens of a sample, of a prompt with its answer; None: `tokens_per_sample`.
        tokenizer: a `tokenizers.Tokenizer` for text; None otherwise.
        notes: facts worth telling, such as the unigram entropy of held-out text; they go to plan.json.
        prompts: held-out prompts, most of them with answers, where the data has such.
        train_prompts: likewise to learn from, one for each of the training samples.
        stop_ids: tokens that end an answer or a document, first the document's; none without tokens.
        bos_id: the token with which a chat template may begin; None: it has none.
        kept: values that the run directory keeps in files of these names, so that the run is opened without its data.
        class_names: of the classes, in the order of their numbers; none: they have only numbers.
        chat_template: in Jinja, as transformers has it, for data that are chats; None: the model continues plain text.
        mixture: of the training samples, where several sources are read in given shares.
        content: as the fingerprint, but the same for the same samples from files of other names; None: the fingerprint.
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
        """In which a run with this seed reads the training samples."""
        if self.mixture is not None:
            return MixtureOrder(self.mixture, fingerprint=self.fingerprint, seed=seed)
        return GlobalOrder(num_samples=len(self.train), fingerprint=self.fingerprint, seed=seed)

    def encode_prompt(self, text: str, *, as_chat: bool = True) -> list[int]:
        """Tokens of a text that the model is to continue; none of the tokenizer's own are added.

        Args:
            text: of a chat what the user says.
            as_chat: put it into the chat template, where there is one.

        Raises:
            ConfigError: the tokenizer fails at it.
            ValueError: the template refuses it.
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
            ConfigError: the tokenizer fails at them.
        """
        from foundry.data.corpora.tokenizer import decode_tokens

        return decode_tokens(self.tokenizer, tokens)

    def identity(self) -> dict[str, Any]:
        """What a checkpoint remembers of its data: content, order, number of samples and digest of the tokenizer."""
        text = getattr(self.tokenizer, "to_str", lambda: None)()
        return {
            "content": self.fingerprint if self.content is None else self.content,
            "order": self.fingerprint,
            "samples": len(self.train),
            "tokenizer": None if text is None else hashlib.sha256(text.encode()).hexdigest(),
        }
