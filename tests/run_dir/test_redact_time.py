"""Masking takes linear time in the length of a text, for any repeated pattern."""

import time

import pytest

from foundry.run_dir.redact import masked_text, one_line


@pytest.mark.parametrize("mask", [masked_text, one_line])
@pytest.mark.parametrize(
    "part",
    [
        "a",
        "a.",
        "a-",
        "+",
        "a=${,",
        "a='",
        "://a",
        ":/a",
        "?a",
        "&token",
        "-eyJ",
        "eyJaaaaaaaa.",
        "-sk-",
        "\x1b[0",
        "\x1b]a",
        "A",
    ],
)
def test_masking_is_linear_in_the_length_of_a_text(mask, part):
    text = part * (300_000 // len(part)) + " ="
    start = time.process_time()
    mask(text)
    assert time.process_time() - start < 3


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http:/bob:hunter2@h/x", "http:/***@h/x"),
        ("x-eyJabcdefgh.abcdefgh.abc", "x-***"),
        ("eyJabcdefgh-hf_abcdefghijklmnopqrstuvwx", "eyJabcdefgh-***"),
        ("a=${x}/password=hunter2", "a=${x}/password=***"),
        ("api_key=${oc.env:KEY,none}", "api_key=${oc.env:KEY,none}"),
    ],
)
def test_bounded_patterns_still_mask_credentials(text, shown):
    assert masked_text(text) == shown
