import pytest

from foundry.run_dir.redact import masked, masked_text
from foundry.tracking.mlflow.tracker import flattened


@pytest.mark.parametrize(
    "key",
    [
        "password",
        "db_password",
        "dbPassword",
        "hf_token",
        "token",
        "accessToken",
        "api_key",
        "apiKey",
        "apikey",
        "OPENAI_API_KEY",
        "client_secret",
        "aws_secret_access_key",
        "private_key",
        "credentials",
        "passphrase",
        "auth-token",
    ],
)
def test_values_of_secret_keys_are_masked(key):
    assert masked({"group": {key: "value"}}) == {"group": {key: "***"}}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens_per_second", 123.4),
        ("num_tokens", 5),
        ("vocab_tokens", "50257"),
        ("eos_token", "<|endoftext|>"),
        ("pad_token", "<pad>"),
        ("eos_token_id", 0),
        ("tokenizer", "gpt2"),
        ("text_key", "text"),
        ("key", "prompt"),
        ("num_key_value_heads", 4),
        ("loss_function", "next_token"),
        ("token", None),
        ("password", ""),
        ("use_auth_token", False),
        ("keyboard", "a1b2c3d4e5f6g7h8i9"),
        ("hidden", 3),
    ],
)
def test_values_of_other_keys_are_shown(key, value):
    assert masked({key: value}) == {key: value}


def test_random_value_under_an_ambiguous_key_is_masked():
    assert masked({"key": "a1b2c3d4e5f6a7b8c9d0"}) == {"key": "***"}


def test_nested_values_under_a_secret_key_are_masked():
    assert masked({"credentials": {"user": "ann", "deep": {"value": "x"}}}) == {
        "credentials": {"user": "***", "deep": {"value": "***"}}
    }
    assert masked({"passwords": ["a"], "password": ["a", "b"]})["password"] == ["***", "***"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://ann:hunter2@host:5000/x", "https://***@host:5000/x"),
        ("postgresql://ann:p%40ss@db/mlflow", "postgresql://***@db/mlflow"),
        ("https://host/x?a=1&access_token=abc&b=2", "https://host/x?a=1&access_token=***&b=2"),
        ("git clone https://ghp_0123456789abcdefghij@github.com/a/b", "git clone https://***@github.com/a/b"),
        ("hf_abcdefghijklmnopqrstuvwx", "***"),
        ("AKIAABCDEFGHIJKLMNOP", "***"),
        ("http://host/path@v2", "http://host/path@v2"),
        ("sqlite:///mlflow.db", "sqlite:///mlflow.db"),
        ("a sk-word and hf_short", "a sk-word and hf_short"),
    ],
)
def test_credentials_in_texts_are_masked(text, shown):
    assert masked_text(text) == shown
    assert masked({"value": [text]}) == {"value": [shown]}


def test_flattened_joins_keys_with_dots():
    config = {"hparams": {"lr": 0.001, "betas": [0.9, 0.95]}, "peft": None, "empty": {}}
    assert flattened(config) == {"hparams.lr": "0.001", "hparams.betas": "[0.9, 0.95]", "peft": "None", "empty": "{}"}


@pytest.mark.parametrize("scheme", ["http", "https", "s3", "postgresql", "mysql+pymysql", "git+ssh", "HTTP", "x-y.z"])
@pytest.mark.parametrize("slashes", ["/", "//", "///"])
@pytest.mark.parametrize(
    "user", ["bob:S3cret", "S3cret", ":S3cret", "a:x@S3cret", *(f"bob:a{c}S3cret" for c in "'?#/")]
)
def test_user_and_password_of_any_address_are_masked(scheme, slashes, user):
    address = f"{scheme}:{slashes}{user}@host/x"
    for text in (address, f"/home/{address}", f"data.path={address}", f"data.path='{address}'", f"no {address}, b"):
        assert "S3cret" not in masked_text(text)
        assert "host/x" in masked_text(text)


@pytest.mark.parametrize("text", ["http://host:5000/a?to=b@c", "s3://bucket/a@b", "C:/a b@c", "http://host:80#a@b"])
def test_address_without_user_is_shown(text):
    assert masked_text(text) == text
