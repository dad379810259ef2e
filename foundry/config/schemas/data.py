"""`data=`: what is learnt from."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from foundry.config.errors import ConfigError, Violation, shown
from foundry.config.image_folder import class_folders
from foundry.config.setting import OnResume, setting

_BYTES_AND_END = 257
MODEL_TOKENIZER, MODEL_VOCAB_SIZE = "${model_folder:}", "${model_vocab_size:4096}"
"""What a tokenizer and its size are where nobody gives them: the model's, where it has them."""
LONGEST_ANSWER = "${oc.select:objective.max_new_tokens,0}"
"""What a prompt leaves room for, where the objective generates answers."""
CHAT_TEMPLATES = ("plain", "chatml")
"""Those that foundry has."""


def _files(doc: str) -> Any:
    """Where samples lie; whether a resumed run may have them elsewhere, their content tells."""
    aliases = "data_path, dataset_path, data_dir, train_file, dataset"
    return setting("???", doc, path=True, aliases=aliases, on_resume=OnResume.data)


def _validation_files(doc: str) -> Any:
    """Likewise of those that are held out; null: there are none."""
    return setting(None, doc, path=True, aliases="valid_data_path, validation_file", on_resume=OnResume.data)


@dataclass(frozen=True, kw_only=True)
class Data:
    """How samples are read; a loader's whole state is the number of samples consumed."""

    _target_: str
    num_workers: int = setting(
        0,
        "processes per rank that read samples ahead; 0: read in the training process",
        ge=0,
        le=1024,
        aliases="dataloader_num_workers, workers",
        on_resume=OnResume.same,
        runtime=True,
    )
    cache_dir: str = setting(
        "${oc.env:FOUNDRY_CACHE,.cache/foundry}",
        "folder for tokenizers and token arrays",
        aliases="data_cache_path",
        on_resume=OnResume.same,
    )


@dataclass(frozen=True, kw_only=True)
class Tokenised(Data):
    """Tokens of text of any kind.

    Attributes:
        is_ragged: whether samples have lengths of their own, of which `seq_len` is the most.
    """

    offers: ClassVar[frozenset[str]] = frozenset({"tokens", "sequences"})
    is_ragged: ClassVar[bool] = False

    _target_: str
    seq_len: int = setting(
        256,
        "tokens per training sequence; of data with rows of their own lengths the most that one may have",
        ge=1,
        le=10**8,
        aliases="seq_length, sequence_length, max_length, block_size, context_length",
    )
    vocab_size: int = setting(
        MODEL_VOCAB_SIZE,
        "entries of the byte-level BPE trained on the text, or most of `tokenizer`; default: the model's in model.path",
        ge=1,
        le=10**8,
    )
    tokenizer: str | None = setting(
        MODEL_TOKENIZER,
        "tokenizer.json or folder to use; null: train one on the training text; model.path brings its own",
        path=True,
        aliases="tokenizer_name, tokenizer_path",
        on_resume=OnResume.data,
    )
    held_out: float = setting(0.05, "share of documents or rows kept for validation", gt=0, lt=1)

    def check(self) -> Iterator[Violation]:
        """A byte-level tokenizer has an entry for each byte and one for the end of a document."""
        if self.tokenizer is None:
            yield from _check_entries(self.vocab_size)


def _check_entries(vocab_size: int) -> Iterator[Violation]:
    if vocab_size < _BYTES_AND_END:
        message = f"is {vocab_size} but must be at least {_BYTES_AND_END}: a byte each and the end of a document"
        yield Violation("data.vocab_size", message)


@dataclass(frozen=True, kw_only=True)
class Text(Tokenised):
    """Text as sequences of the same length."""


@dataclass(frozen=True, kw_only=True)
class StdlibText(Text):
    """The sources of the running Python's standard library."""

    _target_: str = "foundry.data.text.stdlib_text"


@dataclass(frozen=True, kw_only=True)
class TextFiles(Text):
    """Text, JSONL, Parquet, Arrow or CSV files of the user's."""

    _target_: str = "foundry.data.text.text_files"

    path: str = _files("file, folder or glob of text, JSONL, Parquet, Arrow or CSV files")
    text_field: str = setting(
        "text", "column or key that holds the text where files have rows", aliases="text_column, text_key"
    )
    validation_path: str | None = _validation_files("files for validation; null: hold out a share of `path`")


class TokenDtype(Enum):
    """Of numbers in a file that does not say it."""

    uint16 = "uint16"
    uint32 = "uint32"
    int32 = "int32"
    int64 = "int64"


@dataclass(frozen=True, kw_only=True)
class TokenFiles(Text):
    """Tokens that another program has made: .bin of nanoGPT or llm.c, or NumPy's .npy."""

    _target_: str = "foundry.data.token_files.token_files"

    path: str = _files("file, folder or glob of .bin or .npy files")
    validation_path: str | None = _validation_files("files for validation; null: hold out the end of each file")
    dtype: TokenDtype = setting(TokenDtype.uint16, "of the numbers in .bin files, which do not say it")
    vocab_size: int = setting("${model_vocab_size:50304}", "entries of the model; all tokens are below", ge=1, le=10**8)
    tokenizer: str | None = setting(
        MODEL_TOKENIZER,
        "tokenizer.json or folder that the tokens are of, for samples; null: there are none",
        path=True,
        aliases="tokenizer_name, tokenizer_path",
        on_resume=OnResume.data,
    )
    held_out: float = setting(0.05, "share of the end of each file kept for validation", gt=0, lt=1)

    def check(self) -> Iterator[Violation]:
        """Any number of entries will do: nothing is tokenised."""
        return iter(())


class TrainOn(Enum):
    """Which answers of a conversation are learnt."""

    all = "all"
    last = "last"


class OnBadRow(Enum):
    """What becomes of rows that cannot be used."""

    refuse = "refuse"
    skip = "skip"


def _is_file(text: str) -> bool:
    try:
        return Path(text).expanduser().is_file()
    except (OSError, RuntimeError):  # a name that no file can have, or the folder of no user
        return False


def _check_template(template: str | None) -> Iterator[Violation]:
    if template not in (None, *CHAT_TEMPLATES) and not _is_file(str(template)):
        message = f"is {shown(template)} but there is no such file; give {', '.join(CHAT_TEMPLATES)} or a file"
        yield Violation("data.chat_template", message)


def _check_room(seq_len: int, max_new_tokens: int) -> Iterator[Violation]:
    if max_new_tokens >= seq_len:
        message = f"is {seq_len}, of which an answer of objective.max_new_tokens={max_new_tokens} leaves no prompt"
        yield Violation("data.seq_len", f"{message}; shorten the one or lengthen the other")


@dataclass(frozen=True, kw_only=True)
class Templated(Tokenised):
    """Rows of messages, each of its own length, which a chat template makes text of."""

    is_ragged: ClassVar[bool] = True

    chat_template: str | None = setting(
        None,
        "how conversations become text: plain, chatml, or a file with a Jinja template; null: what lies beside the "
        "tokenizer, else plain",
        on_resume=OnResume.data,
    )
    packing: bool = setting(
        False,
        "put several samples of a batch into a row of seq_len tokens, in which none sees another, and several pairs "
        "into two such rows; hparams.per_gpu_batch_size then counts rows, or of pairs twos of rows",
        aliases="sequence_packing_enabled, packed_sequence, sample_packing",
        on_resume=OnResume.same,
        runtime=True,
    )

    def check(self) -> Iterator[Violation]:
        """The template is a known one, or a file."""
        yield from super().check()
        yield from _check_template(self.chat_template)


@dataclass(frozen=True, kw_only=True)
class Conversations(Templated):
    """Rows of which the model learns what the assistant says."""

    offers: ClassVar[frozenset[str]] = frozenset({"tokens", "sequences", "completions"})

    train_on: TrainOn = setting(TrainOn.all, "which of the assistant's turns are learnt: all or the last")


@dataclass(frozen=True, kw_only=True)
class RowFiles(Templated):
    """Rows of the user's in JSONL, Parquet, Arrow or CSV."""

    path: str = _files("file, folder or glob of JSONL, Parquet, Arrow or CSV files")
    validation_path: str | None = _validation_files("files for validation; null: hold out a share of `path`")
    on_bad_row: OnBadRow = setting(
        OnBadRow.refuse,
        "what becomes of rows that are no JSON, hold something else, have no answer or too many tokens: refuse or skip",
    )


@dataclass(frozen=True, kw_only=True)
class ChatFiles(RowFiles, Conversations):
    """Conversations of the user's in JSONL, Parquet, Arrow or CSV: `messages`, or `prompt` and `completion`."""

    _target_: str = "foundry.data.chats.chat_files"


@dataclass(frozen=True, kw_only=True)
class PreferenceFiles(RowFiles):
    """Preferences of the user's in files of rows: `prompt`, `chosen` and `rejected`, texts or lists of messages."""

    offers: ClassVar[frozenset[str]] = frozenset({"tokens", "pairs"})

    _target_: str = "foundry.data.preferences.preference_files"


@dataclass(frozen=True, kw_only=True)
class PromptFiles(RowFiles):
    """Prompts of the user's in files of rows, texts or messages, with other columns for the environment."""

    offers: ClassVar[frozenset[str]] = frozenset({"tokens", "prompts"})

    _target_: str = "foundry.data.prompts.prompt_files"
    max_new_tokens: int = setting(
        LONGEST_ANSWER, "tokens of seq_len that a prompt leaves for its answer: the objective's", ge=0
    )

    def check(self) -> Iterator[Violation]:
        """Prompts have room."""
        yield from super().check()
        yield from _check_room(self.seq_len, self.max_new_tokens)


@dataclass(frozen=True, kw_only=True)
class AboutPictures(Tokenised):
    """Conversations about a picture each."""

    offers: ClassVar[frozenset[str]] = frozenset({"tokens", "images", "completions"})
    is_ragged: ClassVar[bool] = True
    num_images: ClassVar[int] = 1

    chat_template: str | None = setting(
        None,
        "how conversations become text: plain, chatml, or a file with a Jinja template; null: what lies beside the "
        "tokenizer, else plain",
        on_resume=OnResume.data,
    )
    train_on: TrainOn = setting(TrainOn.all, "which of the assistant's turns are learnt: all or the last")

    def check(self) -> Iterator[Violation]:
        """The template is a known one, or a file."""
        yield from super().check()
        yield from _check_template(self.chat_template)


@dataclass(frozen=True, kw_only=True)
class ImageChatFiles(AboutPictures):
    """Conversations of the user's in files of rows, each with `image`, the path of a picture."""

    _target_: str = "foundry.data.image_chats.image_chat_files"

    path: str = _files("file, folder or glob of JSONL, Parquet, Arrow or CSV files")
    validation_path: str | None = _validation_files("files for validation; null: hold out a share of `path`")
    on_bad_row: OnBadRow = setting(
        OnBadRow.refuse,
        "what becomes of rows that are no JSON, hold something else, have no answer, no picture that can be read, or "
        "too many tokens: refuse or skip",
    )
    image_size: int = setting(
        96, "height and width in pixels that pictures are brought to, whatever their own are", ge=8, le=4096
    )


@dataclass(frozen=True, kw_only=True)
class Scenes(AboutPictures):
    """Pictures of the starts of the simulator's episodes, with what it says about them; made once, and kept."""

    _target_: str = "foundry.data.scenes.scenes"

    num_scenes: int = setting(4200, "pictures, those held out among them", ge=2, le=2**30, aliases="num_rows")
    seq_len: int = setting(64, "most tokens of a conversation", ge=1, le=10**8)
    vocab_size: int = setting(
        320, "entries of the byte-level BPE trained on the conversations, or most of `tokenizer`", ge=1, le=10**8
    )
    image_size: int | None = setting(
        "${simulator_size:image_size}", "height and width in pixels of the picture: the simulator's", ge=8, le=4096
    )


class ArithmeticForm(Enum):
    """What a sample of `data=arithmetic` is."""

    text = "text"
    chats = "chats"
    preferences = "preferences"
    prompts = "prompts"


@dataclass(frozen=True, kw_only=True)
class Arithmetic(Conversations):
    """Sums of two- and three-digit numbers, worked out digit by digit; the same ones are held out in every form."""

    _target_: str = "foundry.data.arithmetic.arithmetic"
    form: ArithmeticForm = setting(
        ArithmeticForm.chats,
        "text: sequences for objective=next_token; chats: conversations for objective=sft; preferences: right answers "
        "and others with a wrong carry, for objective=dpo; prompts: questions for objective=grpo, and for "
        "objective=distillation with mode=on_policy",
    )
    num_rows: int = setting(20_000, "lines of text or conversations to learn from", ge=2, le=10**8)
    seq_len: int = setting(
        160, "tokens per training sequence of text, or the most that a conversation may have", ge=1, le=10**8
    )
    vocab_size: int = setting(
        257,
        "entries of the tokenizer; 257 are the bytes and the end of a document, so no digits merge",
        ge=1,
        le=10**8,
    )
    max_new_tokens: int = setting(
        LONGEST_ANSWER, "tokens of seq_len that a question leaves for its answer: the objective's", ge=0
    )

    @property
    def offers(self) -> frozenset[str]:  # type: ignore[override] # it depends on the form
        """What a sample has."""
        by_form: dict[ArithmeticForm, type[Tokenised]] = {
            ArithmeticForm.text: Text,
            ArithmeticForm.chats: Conversations,
            ArithmeticForm.preferences: PreferenceFiles,
            ArithmeticForm.prompts: PromptFiles,
        }
        return by_form[self.form].offers

    @property
    def is_ragged(self) -> bool:  # type: ignore[override]
        """Whether samples have lengths of their own."""
        return self.form is not ArithmeticForm.text

    def check(self) -> Iterator[Violation]:
        """No setting would be ignored, and questions have room for an answer."""
        yield from super().check()
        if self.train_on is not TrainOn.all and self.form is not ArithmeticForm.chats:
            yield Violation("data.train_on", f"is {self.train_on.value} but means nothing without data.form=chats")
        if self.form is ArithmeticForm.prompts:
            yield from _check_room(self.seq_len, self.max_new_tokens)


@dataclass(frozen=True, kw_only=True)
class Digits(Data):
    """scikit-learn's 1,797 images of handwritten digits, 8 by 8 pixels, ten classes."""

    offers: ClassVar[frozenset[str]] = frozenset({"images", "labels"})

    _target_: str = "foundry.data.digits.digits"
    image_size: int = setting(8, "height and width in pixels: the images' own", ge=8, le=8)
    num_channels: int = setting(1, "colour channels: the images' own", ge=1, le=1)
    num_classes: int = setting(10, "classes: the images' own", ge=10, le=10)
    held_out: float = setting(0.1, "share of images kept for validation", gt=0, lt=1)


class PictureFit(Enum):
    """What becomes of a picture that is not square."""

    crop = "crop"
    stretch = "stretch"


@dataclass(frozen=True, kw_only=True)
class ImageFolder(Data):
    """Pictures of your own: a folder with a folder for each class, of PNG, JPEG or WebP files."""

    offers: ClassVar[frozenset[str]] = frozenset({"images", "labels"})

    _target_: str = "foundry.data.image_folder.image_folder"
    path: str = setting(
        "???", "folder with a folder for each class", aliases="data_dir, train_data_dir, root", on_resume=OnResume.data
    )
    image_size: int = setting(
        32, "height and width in pixels that pictures are brought to", ge=4, le=4096, aliases="resolution, img_size"
    )
    num_channels: int = setting(3, "3: red, green and blue; 1: grey", ge=1, le=3, aliases="in_channels")
    num_classes: int = setting("${image_classes:}", "classes: the folders in `path`", ge=1, le=10**6, runtime=True)
    fit: PictureFit = setting(
        PictureFit.crop, "of a picture that is not square: crop takes the middle, stretch all of it"
    )
    mirror: bool = setting(
        False, "also train on each picture the other way round, left to right", aliases="random_flip, horizontal_flip"
    )
    held_out: float = setting(0.05, "share of the pictures of each class kept for validation", gt=0, lt=1)

    def check(self) -> Iterator[Violation]:
        """The folder is there, and colours are three or one."""
        if self.num_channels == 2:
            yield Violation("data.num_channels", "is 2 but pictures have 3 colours, or are grey with 1")
        try:
            folders = class_folders(self.path)
        except ConfigError as error:
            yield from error.violations
            return
        if self.num_classes != len(folders):
            message = f"is {self.num_classes} but {shown(self.path)} has {len(folders)} folders; leave it out"
            yield Violation("data.num_classes", message)


@dataclass(frozen=True, kw_only=True)
class Episodes(Data):
    """Episodes of a robot, as windows: what it has seen of late, and what it does next."""

    num_observations: int = setting(
        2, "states that a policy sees: the present one and those before it", ge=1, le=1024, aliases="n_obs_steps"
    )
    horizon: int = setting(
        16, "actions of a sample, from the present one on", ge=1, le=10**5, aliases="chunk_size, action_horizon"
    )
    state_dim: int = setting("???", "numbers in a state", ge=1, le=10**6, runtime=True)
    action_dim: int = setting("???", "numbers in an action", ge=1, le=10**6, runtime=True)
    image_size: int | None = setting(
        None,
        "height and width in pixels of the picture that a policy sees besides; null: none",
        ge=8,
        le=4096,
        runtime=True,
    )
    held_out: float = setting(0.05, "share of episodes kept for validation, at least one", gt=0, lt=1)
    instruction_tokens: int | None = setting(
        None,
        "most tokens of an instruction, the words that say what is to be done; longer ones are refused; null: a policy "
        "is not told any",
        ge=1,
        le=10**5,
        runtime=True,
    )
    vocab_size: int = setting(
        MODEL_VOCAB_SIZE,
        "entries of the byte-level BPE trained on the instructions, or most of `tokenizer`; default: those of the "
        "weights in model.backbone.init_from",
        ge=1,
        le=10**8,
        runtime=True,
    )
    tokenizer: str | None = setting(
        MODEL_TOKENIZER,
        "of instructions: tokenizer.json or folder; null: train one on those of the training episodes; the weights in "
        "model.backbone.init_from bring their own",
        path=True,
        on_resume=OnResume.data,
        runtime=True,
    )

    @property
    def offers(self) -> frozenset[str]:
        """What a sample has."""
        return frozenset({"actions"} if self.instruction_tokens is None else {"actions", "instructions"})

    def check(self) -> Iterator[Violation]:
        """A byte-level tokenizer has an entry for each byte and one for the end of a document."""
        if self.instruction_tokens is not None and self.tokenizer is None:
            yield from _check_entries(self.vocab_size)


@dataclass(frozen=True, kw_only=True)
class Demonstrations(Episodes):
    """Successful episodes of the simulator's expert, the same for every seed of a run; made once, and kept."""

    _target_: str = "foundry.data.demonstrations.demonstrations"

    episodes: int = setting(300, "successful episodes", ge=2, le=10**7, aliases="num_episodes, num_demos")
    noise: float = setting(
        0.2,
        "standard deviation of what is added to the actions that are executed, in the simulator's units; the expert's "
        "own are recorded, so that it shows how to come back",
        ge=0,
    )
    noisy_share: float = setting(0.7, "share of episodes with noise", ge=0, le=1)
    state_dim: int = setting(
        "${simulator_size:state_dim}", "numbers in a state: the simulator's", ge=1, le=10**6, runtime=True
    )
    action_dim: int = setting(
        "${simulator_size:action_dim}", "numbers in an action: the simulator's", ge=1, le=10**6, runtime=True
    )
    image_size: int | None = setting(
        "${simulator_size:image_size}",
        "height and width in pixels of the picture that a policy sees besides: the simulator's; null: none",
        ge=8,
        le=4096,
        runtime=True,
    )


@dataclass(frozen=True, kw_only=True)
class LeRobot(Episodes):
    """Episodes of your own, in a folder in LeRobot's format, version 3."""

    _target_: str = "foundry.data.lerobot.lerobot"

    path: str = setting(
        "???", "folder with meta/info.json", aliases="repo_id, root, dataset_path", on_resume=OnResume.data
    )
    state_key: str = setting("observation.state", "column of the states")
    action_key: str = setting("action", "column of the actions")
    image_key: str | None = setting(
        None, "column of pictures or videos that a policy sees besides, as observation.images.front; null: none"
    )
    state_dim: int = setting(
        "${lerobot_size:state_dim}", "numbers in a state: the column's", ge=1, le=10**6, runtime=True
    )
    action_dim: int = setting(
        "${lerobot_size:action_dim}", "numbers in an action: the column's", ge=1, le=10**6, runtime=True
    )
    image_size: int | None = setting(
        "${lerobot_size:image_size}",
        "height and width in pixels that pictures are brought to; default: their own, where they are square",
        ge=8,
        le=4096,
        runtime=True,
    )

    def check(self) -> Iterator[Violation]:
        """Pictures have a column."""
        yield from super().check()
        if self.image_key is None and self.image_size is not None:
            yield Violation("data.image_size", f"is {self.image_size} but means nothing without data.image_key")
