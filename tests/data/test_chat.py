"""Chat templates: only answers contribute to the loss; errors and limits give one-line errors."""

import json
import os
import re

import pytest
from tokenizers import AddedToken

from foundry.core.errors import ConfigError
from foundry.data.conversations import chat
from foundry.data.conversations.chat import ChatTemplate, read_template, resolve_chat_template, resolve_stop_ids
from foundry.data.corpora.tokenizer import END_OF_DOCUMENT, train_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6"},
]
PLAIN = ChatTemplate(read_template("plain"), {"eos_token": END_OF_DOCUMENT})
CHATML = ChatTemplate(read_template("chatml"), {}, ("<|im_start|>", "<|im_end|>"))
# The template chatml without generation marks, like most templates on the Hugging Face hub.
UNMARKED = ChatTemplate(
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    {},
    ("<|im_start|>", "<|im_end|>"),
)
# Renders the reasoning of the last assistant turn only.
FORGETFUL = ChatTemplate(
    "{% for m in messages %}{{ m['role'] + ':' }}{% if m['role'] == 'assistant' and loop.last %}{{ ' hm,' }}{% endif %}"
    "{{ m['content'] + ';' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def marked(template, messages, *, num_trained=None):
    """Return the rendered conversation with its trained parts in brackets."""
    segments = template.segments(messages, num_trained=num_trained)
    return "".join(f"[{segment.text}]" if segment.is_trained else segment.text for segment in segments)


END = END_OF_DOCUMENT
CHATML_TEXT = (
    "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n[4<|im_end|>]\n"
    "<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n[6<|im_end|>]"
)


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (PLAIN, TURNS[:2], f"user: 2+2?\nassistant: [4{END}]"),
        (PLAIN, TURNS, f"user: 2+2?\nassistant: [4{END}]user: 3+3?\nassistant: [6{END}]"),
        (PLAIN, [SYSTEM, *TURNS[:2]], f"system: Be brief.\nuser: 2+2?\nassistant: [4{END}]"),
        (PLAIN, TURNS[:3], f"user: 2+2?\nassistant: [4{END}]"),
        (CHATML, TURNS, CHATML_TEXT),
        (UNMARKED, TURNS, CHATML_TEXT),
        (UNMARKED, [SYSTEM, *TURNS], f"<|im_start|>system\nBe brief.<|im_end|>\n{CHATML_TEXT}"),
        (FORGETFUL, TURNS[:2], "user:2+2?;assistant:[ hm,4;]"),
    ],
)
def test_only_assistant_turns_are_trained(template, messages, expected):
    assert marked(template, messages) == expected


def test_num_trained_limits_training_to_the_last_assistant_turn():
    expected = f"user: 2+2?\nassistant: 4{END}user: 3+3?\nassistant: [6{END}]"
    assert marked(PLAIN, TURNS, num_trained=1) == expected
    assert marked(UNMARKED, TURNS, num_trained=1) == CHATML_TEXT.replace("[4<|im_end|>]", "4<|im_end|>")
    assert marked(FORGETFUL, TURNS, num_trained=1) == "user:2+2?;assistant:4;user:3+3?;assistant:[ hm,6;]"


@pytest.mark.parametrize("template", [PLAIN, CHATML, UNMARKED])
@pytest.mark.parametrize("answers", [1, 2])
def test_text_before_the_answer_equals_the_generation_prompt(template, answers):
    before = template.segments(TURNS[: 2 * answers], num_trained=1)[:-1]
    asked = template.render(TURNS[: 2 * answers - 1], for_answer=True)
    assert "".join(segment.text for segment in before) == asked


def test_template_that_rewrites_earlier_turns_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"not rendered as a continuation .* data\.train_on=last"):
        FORGETFUL.segments(TURNS, num_trained=None)


def test_template_exception_and_missing_answer_are_value_errors():
    refusing = ChatTemplate("{{ raise_exception('no system turns') }}")
    with pytest.raises(ValueError, match="refused by the chat template: no system turns"):
        refusing.segments(TURNS, num_trained=None)
    with pytest.raises(ValueError, match="no answer that the chat template marks"):
        ChatTemplate("{% generation %}{% endgeneration %}").segments(TURNS, num_trained=None)


RAISING = [
    "{{ 1/0 }}",
    "{{ 2.0**5000 }}",
    "{{ 'a'.encode('nope') }}",
    "{{ (1).to_bytes(0, 'little') }}",
    "{{ 'a' * -1 + 1 }}",
    "{{ [1, 2]|random(3) }}",
    "{{ '\ud800' }}",
    "{{ messages[0].missing.deeper }}",
    "{{ '{:d}'.format('x') }}",
    "{{ range(10**9) }}",
    "{% include 'other' %}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% generation %}{{ 1 // 0 }}{% endgeneration %}",
]
UNREADABLE = [
    "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "{{ not " * 3 + "1 }}",
    "{% break %}",
    "{{ 10**5000 }}",
    "{% for m in messages %}",
    "{{ \ud800 }}",
    "\ud800",
    "{{ 1 | no_such_filter }}",
]


@pytest.mark.parametrize("source", [*RAISING, *UNREADABLE], ids=range(len(RAISING) + len(UNREADABLE)))
def test_any_template_error_is_a_printable_line(source):
    with pytest.raises(ValueError, match=r"^is refused by the chat template: .") as refused:
        ChatTemplate(source, {"bos_token": "", "eos_token": END}).segments(TURNS, num_trained=None)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("source", UNREADABLE, ids=range(len(UNREADABLE)))
def test_template_that_jinja_cannot_compile_is_a_config_error(tmp_path, source):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    tokenizer = byte_tokenizer()
    with pytest.raises(ConfigError, match=r"^data\.chat_template: is not a valid Jinja template: .*"):
        resolve_chat_template(None, str(tmp_path), tokenizer, tokenizer.token_to_id(END))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", b"gr\xfc\xdfe"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": ["a"], "template": "x"}]}'),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b'{"bos_token": "\\ud800"}'),
        ("tokenizer_config.json", b"\xff"),
    ],
)
def test_tokenizer_folder_with_unreadable_template_is_a_config_error(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    tokenizer = byte_tokenizer()
    with pytest.raises(ConfigError):
        resolve_chat_template(None, str(tmp_path), tokenizer, tokenizer.token_to_id(END))


def byte_tokenizer(*special):
    tokenizer = train_tokenizer(["a"], 257)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    return tokenizer


def test_template_of_the_tokenizer_folder_is_the_default(tmp_path):
    tokenizer = byte_tokenizer()
    end = tokenizer.token_to_id(END)
    assert resolve_chat_template(None, None, tokenizer, end).source == read_template("plain")
    assert resolve_chat_template(None, str(tmp_path), tokenizer, end).source == read_template("plain")
    settings = {"chat_template": [{"name": "default", "template": "of the settings"}], "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = resolve_chat_template(None, str(tmp_path), tokenizer, end)
    assert (found.source, found.variables) == ("of the settings", {"bos_token": "<s>", "eos_token": END})
    (tmp_path / "chat_template.jinja").write_text("of a separate file")
    assert resolve_chat_template(None, str(tmp_path), tokenizer, end).source == "of a separate file"
    assert resolve_chat_template("plain", str(tmp_path), tokenizer, end).source == read_template("plain")
    mine = tmp_path / "mine.jinja"
    mine.write_text("mine")
    assert resolve_chat_template(str(mine), str(tmp_path), tokenizer, end).source == "mine"


def test_template_with_missing_tokens_or_bad_syntax_is_refused(tmp_path):
    tokenizer = byte_tokenizer()
    with pytest.raises(ConfigError, match=r"data\.chat_template: is chatml but the tokenizer has no <\|im_start\|>"):
        resolve_chat_template("chatml", None, tokenizer, 0)
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}")
    with pytest.raises(ConfigError, match=r"data\.chat_template: is not a valid Jinja template: .* in line 1"):
        resolve_chat_template(str(tmp_path / "broken.jinja"), None, tokenizer, 0)


def test_stop_ids_are_end_of_document_and_end_of_turn():
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>")
    end, turn = tokenizer.token_to_id(END), tokenizer.token_to_id("<|im_end|>")
    for choice, expected in (("plain", (end,)), ("chatml", (end, turn))):
        template = resolve_chat_template(choice, None, tokenizer, end)
        assert resolve_stop_ids(template, tokenizer, end) == expected


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        (ENDLESS, "more than 0.1 s"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "more than 0.1 s",
        ),
        ("{{ ([range(99999) | list] * 99999) | map('sum') | list }}", "more than 0.1 s"),
        ("{{ 9 ** (9 ** 9) }}", "more than 0.1 s"),
        ("{{ 'a' * 10000000000 }}", "more than 64 MiB"),
        ("{{ 'a' | replace('a', 'b' * 1000000000) }}", "more than 64 MiB"),
        ("{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "64 MiB"),
        ("{{ '%1000000000d' % 1 }}", "more than 64 MiB"),
        ("{{ 'a'.ljust(1000000000) }}", "more than 64 MiB"),
    ],
)
def test_template_over_the_cpu_or_memory_limit_is_a_config_error(source, limit, monkeypatch):
    monkeypatch.setattr(chat, "_CPU_SECONDS", 0.1 if limit.endswith(" s") else 20.0)
    monkeypatch.setattr(chat, "_MEMORY_BYTES", 2**26)
    template = ChatTemplate("{% if messages | length > 1 %}" + source + "{% endif %}")
    with pytest.raises(ConfigError, match=rf"data\.chat_template: .*{re.escape(limit)}"):
        template.render(TURNS)


def test_rendered_conversation_has_a_maximum_length(monkeypatch):
    monkeypatch.setattr(chat, "_MAX_CHARACTERS", 1000)
    for template in (ChatTemplate("{{ 'a' * 2000 }}"), PLAIN):
        with pytest.raises(ValueError, match="has more than 1000 characters"):
            template.render([{"role": "user", "content": "a" * 1001}])


def test_cpu_limit_holds_for_segments_batches_and_the_syntax_check(monkeypatch):
    monkeypatch.setattr(chat, "_CPU_SECONDS", 0.1)
    template = ChatTemplate(ENDLESS)
    with pytest.raises(ConfigError, match=r"more than 0\.1 s"):
        template.segments(TURNS, num_trained=None)
    with pytest.raises(ConfigError, match=r"more than 0\.1 s"), template.limited(template.render) as render:
        render(TURNS)
    with pytest.raises(ConfigError, match=r"more than 0\.1 s"):
        ChatTemplate("{{ 9 ** (9 ** 9) }}").render(TURNS)


def test_builtin_templates_are_rendered_without_forking(monkeypatch):
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("another process"))
    assert "2+2?" in PLAIN.render(TURNS)
    assert CHATML.segments(TURNS, num_trained=None)
    with PLAIN.limited(len) as function:
        assert function is len


def test_batches_of_a_user_template_share_one_child_process():
    def render(batch):
        return [(UNMARKED.render(messages), os.getpid()) for messages in batch]

    with UNMARKED.limited(render) as limited:
        (first, one), (second, other) = [*limited([TURNS]), *limited([TURNS[:1]])]
    assert (first, second) == (UNMARKED.render(TURNS), UNMARKED.render(TURNS[:1]))
    assert one == other != os.getpid()
