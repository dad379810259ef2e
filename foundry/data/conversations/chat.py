"""Chat templates: rendering of conversations to text, and location of the assistant's answers in it."""

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from tokenizers import Tokenizer

from foundry.core.errors import ConfigError, Violation
from foundry.core.foreign import ForeignData
from foundry.data.corpora.tokenizer import config_value, encode_texts, tokenizer_file
from foundry.data.io.limited_process import LimitedProcess, LimitExceededError, is_limited, renew_limit
from foundry.run_dir.files import in_hub_cache, read_text
from foundry.run_dir.names import CHAT_TEMPLATE

Message = Mapping[str, Any]
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_KEY = "data.chat_template"
_PLAIN = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}assistant: "
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
BUILT_IN = {"plain": _PLAIN, "chatml": _CHATML}
_CPU_SECONDS = 20.0
"""Limit of processor time for one conversation, which normally takes microseconds."""
_MEMORY_BYTES = 2**31
_MAX_CHARACTERS = 2**26
"""Maximum length of a rendered conversation, because its tokenization has no time limit."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Segment(NamedTuple):
    """Part of a rendered conversation; segments are tokenized separately, like a prompt and its completion.

    Attributes:
        text: text as the template renders it.
        is_trained: the segment is part of an answer and counts in the loss.
    """

    text: str
    is_trained: bool


@dataclass(frozen=True)
class ChatTemplate:
    """Jinja chat template in the format of transformers.

    Templates other than the built-in ones are rendered in a separate process with limits of time and memory.

    Attributes:
        source: Jinja source.
        variables: values of `bos_token` and `eos_token`, which the template can use in addition to the messages.
        special_tokens: special tokens of the tokenizer, which can end a turn.
    """

    source: str
    variables: Mapping[str, str] = field(default_factory=dict)
    special_tokens: tuple[str, ...] = ()

    def segments(self, messages: Sequence[Message], *, num_trained: int | None) -> list[Segment]:
        """Render the conversation up to its last answer, and split it into prompt and answer segments.

        Answers are marked in the template with `{% generation %}` and `{% endgeneration %}`. In a template without
        these tags, an answer is the text that its turn adds to the preceding messages rendered with a generation
        prompt, without white space after a final special token.

        Args:
            messages: messages with `role` and `content`, at least one of the assistant.
            num_trained: number of answers to train on, counted from the last; None for all.

        Raises:
            ValueError: the template rejects the messages, marks no answer, or renders an answer that does not continue
                the text before it.
            ConfigError: rendering exceeds a limit of time or memory.
        """
        segments: list[Segment] = self._limited("_segments", messages, num_trained)
        return segments

    def render(self, messages: Sequence[Message], *, for_answer: bool = False) -> str:
        """Render a conversation to text.

        Args:
            messages: messages with `role` and `content`.
            for_answer: append the generation prompt.

        Raises:
            ValueError: the template rejects the messages.
            ConfigError: rendering exceeds a limit of time or memory.
        """
        text: str = self._limited("_text", messages, for_answer)
        return text

    def check_syntax(self) -> None:
        """Check the syntax by compiling the template, which evaluates its constant expressions.

        Raises:
            ValueError: the source is not a valid Jinja template.
            ConfigError: compilation exceeds a limit of time or memory.
        """
        self._limited("_compile")

    @contextmanager
    def limited(self, function: Callable[Parameters, Result]) -> Iterator[Callable[Parameters, Result]]:
        """Yield a version of `function` that runs in one separate process, with limits for each conversation.

        If the template is built in, or the caller already runs in a limited process, yield `function` itself.

        Args:
            function: function that renders conversations with this template; its arguments and its result must be
                picklable.
        """
        if self._is_built_in or is_limited():
            yield function
            return
        process = self._process(function)

        def call(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
            result: Result = _call(process, *args, **options)
            return result

        try:
            yield call
        finally:
            process.close()

    def _limited(self, method: str, *args: Any) -> Any:
        if is_limited():
            renew_limit(_CPU_SECONDS)
        if self._is_built_in or is_limited():
            return self._apply(method, args)
        entry: tuple[ChatTemplate, LimitedProcess] | None = getattr(_thread_state, "process", None)
        if entry is None or entry[0] != self:
            if entry is not None:
                entry[1].close()
            entry = _thread_state.process = self, self._process(self._apply)
        return _call(entry[1], method, args)

    @property
    def _is_built_in(self) -> bool:
        return self.source in BUILT_IN.values()

    def _process(self, function: Callable[..., Any]) -> LimitedProcess:
        import transformers.utils.chat_template_utils  # noqa: F401 # import before the fork, not in each process

        return LimitedProcess(function, cpu_seconds=_CPU_SECONDS, memory_bytes=_MEMORY_BYTES)

    def _apply(self, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(self, method)(*args)

    def _compile(self) -> None:
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import _compile_jinja_template

        with ForeignData(ValueError, MemoryError):
            "".join((self.source, *self.variables.values())).encode()  # raises if the text has an unpaired surrogate
            try:
                _compile_jinja_template(self.source)
            except TemplateSyntaxError as error:
                raise ValueError(f"{error.message} in line {error.lineno}") from error

    def _segments(self, messages: Sequence[Message], num_trained: int | None) -> list[Segment]:
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        messages = messages[: answers[-1] + 1]
        first = 0 if num_trained is None else -num_trained
        if _GENERATION.search(self.source):
            text, spans = self._render(messages, with_spans=True)
        else:
            text = self._text(messages)
            spans = [self._answer_by_prefix(messages, index, text) for index in answers[first:]]
        spans = [(start, end) for start, end in spans[first:] if start < end]
        if not spans:
            raise ValueError("has no answer that the chat template marks with {% generation %}")
        return list(_split_text(text, spans))

    def _text(self, messages: Sequence[Message], for_answer: bool = False) -> str:
        return self._render(messages, for_answer=for_answer)[0]

    def _answer_by_prefix(self, messages: Sequence[Message], index: int, full_text: str) -> tuple[int, int]:
        """Return where the answer in message `index` starts and ends in the text of the whole conversation.

        Raises:
            ValueError: the text of the messages up to the answer, or before it, is not a prefix of the whole text.
        """
        prompt_text = self._text(messages[:index], for_answer=True)
        answered_text = full_text if index + 1 == len(messages) else self._text(messages[: index + 1])
        if not (full_text.startswith(answered_text) and answered_text.startswith(prompt_text)):
            remedy = "mark the answers in the template with {% generation %}"
            if index + 1 < len(messages):
                remedy += ", or set data.train_on=last"
            message = f"is not rendered as a continuation of its first {index} messages by the chat template"
            raise ValueError(f"{message}: {remedy}")
        stripped = answered_text.rstrip()
        return len(prompt_text), len(stripped) if stripped.endswith(self.special_tokens) else len(answered_text)

    def _render(
        self, messages: Sequence[Message], *, for_answer: bool = False, with_spans: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        with ForeignData(lambda reason: ValueError(f"is refused by the chat template: {reason}"), MemoryError):
            render: Any = render_jinja_template
            rendered, spans = render(
                [[dict(message) for message in messages]],
                chat_template=self.source,
                return_assistant_tokens_mask=with_spans,
                add_generation_prompt=for_answer,
                **self.variables,
            )
            rendered[0].encode()  # raises if the text has an unpaired surrogate
        if len(rendered[0]) > _MAX_CHARACTERS:
            raise ValueError(f"has more than {_MAX_CHARACTERS} characters when rendered by the chat template")
        return rendered[0], list(spans[0]) if with_spans else []


_thread_state = threading.local()
"""Attribute `process`: the last template that this thread rendered in a separate process, and that process."""


def _call(process: LimitedProcess, *args: Any, **options: Any) -> Any:
    try:
        return process.call(*args, **options)
    except LimitExceededError as error:
        message = f"{error} for one conversation; correct the template or choose another"
        raise ConfigError(Violation(_KEY, message)) from None


def _split_text(text: str, spans: Sequence[tuple[int, int]]) -> "list[Segment]":
    segments, done = list[Segment](), 0
    for start, end in spans:
        segments += [Segment(text[done:start], False), Segment(text[start:end], True)]
        done = end
    return [segment for segment in segments if segment.text]


def resolve_chat_template(
    choice: str | None, tokenizer_path: str | None, tokenizer: Tokenizer, end: int
) -> ChatTemplate:
    """Return the chat template of a run.

    Args:
        choice: `plain`, `chatml`, or a file; None for the template next to the tokenizer if any, else plain.
        tokenizer_path: tokenizer.json or its folder; None if the tokenizer was trained for this run.
        tokenizer: the loaded tokenizer.
        end: id of the tokenizer's end-of-document token.

    Raises:
        ConfigError: the file cannot be read, it is not a valid template, or the tokenizer lacks the tokens of `chatml`.
    """
    folder = None if tokenizer_path is None else tokenizer_file(tokenizer_path).parent
    source = find_template(folder) if choice is None and folder is not None else None
    missing = [token for token in _CHATML_TOKENS if tokenizer.token_to_id(token) is None]
    if choice == "chatml" and missing:
        message = f"is chatml but the tokenizer has no {' and no '.join(missing)}; set data.chat_template=plain"
        raise ConfigError(Violation(_KEY, message))
    variables = {"eos_token": str(tokenizer.id_to_token(end)), "bos_token": _bos_token(folder)}
    special = tuple(added.content for added in tokenizer.get_added_tokens_decoder().values() if added.special)
    template = ChatTemplate(source or read_template(choice), variables, special)
    _check_syntax(template)
    return template


def read_template(choice: str | None) -> str:
    """Return the source of a template.

    Args:
        choice: name of a built-in template, or a file; None for plain.

    Raises:
        ConfigError: the file cannot be read.
    """
    if choice is None or choice in BUILT_IN:
        return BUILT_IN[choice or "plain"]
    try:
        return read_text(Path(choice).expanduser())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"is {choice}, which cannot be read: {reason}; give plain, chatml or a file with a Jinja template"
        raise ConfigError(Violation(_KEY, message)) from None


def _check_syntax(template: ChatTemplate) -> None:
    with ForeignData(lambda reason: ConfigError(Violation(_KEY, f"is not a valid Jinja template: {reason}"))):
        template.check_syntax()


def find_template(folder: Path) -> str | None:
    """Return the template that transformers or foundry wrote next to a tokenizer, or None.

    Raises:
        ConfigError: the template cannot be read.
    """
    with ForeignData(partial(_refuse_folder, folder)):
        file = folder / CHAT_TEMPLATE
        if file.is_file():
            return read_text(in_hub_cache(file))
        value = config_value(folder / "tokenizer_config.json", "chat_template")
        if isinstance(value, list):  # several named templates
            templates = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
            value = templates.get("default")
    return value if isinstance(value, str) else None


def _refuse_folder(folder: Path, reason: str) -> ConfigError:
    message = f"is {folder}, whose chat template cannot be read: {reason}; set data.chat_template=plain, or to a file"
    return ConfigError(Violation("data.tokenizer", message))


def _bos_token(folder: Path | None) -> str:
    value = None if folder is None else config_value(folder / "tokenizer_config.json", "bos_token")
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""


def resolve_stop_ids(template: ChatTemplate, tokenizer: Tokenizer, end: int) -> tuple[int, ...]:
    """Return the stop tokens of answers: end of document, and the special token that ends an answer, if any."""
    example = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        answer = template.segments(example, num_trained=1)[-1].text
    except ValueError:  # the template rejects this short conversation
        return (end,)
    last = encode_texts(tokenizer, [answer])[0][-1:]
    special = [token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special]
    return tuple(dict.fromkeys([end, *(token for token in last if token in special)]))
