"""`data=`: the training data."""

from foundry.config.schemas.data.arithmetic import Arithmetic, ArithmeticForm
from foundry.config.schemas.data.base import MODEL_TOKENIZER, MODEL_VOCAB_SIZE, Data, EncodingErrors, Tokenised
from foundry.config.schemas.data.pictures import AboutPictures, Digits, ImageChatFiles, ImageFolder, PictureFit
from foundry.config.schemas.data.rows import (
    CHAT_TEMPLATES,
    ChatFiles,
    Conversations,
    OnBadRow,
    Packable,
    RowFiles,
    Templated,
    TrainOn,
)
from foundry.config.schemas.data.text import PackingStrategy, StdlibText, Text, TextFiles, TokenDtype, TokenFiles
from foundry.core.moved_modules import find_moved

__getattr__ = find_moved(__name__)

__all__ = [
    "CHAT_TEMPLATES",
    "MODEL_TOKENIZER",
    "MODEL_VOCAB_SIZE",
    "AboutPictures",
    "Arithmetic",
    "ArithmeticForm",
    "ChatFiles",
    "Conversations",
    "Data",
    "Digits",
    "EncodingErrors",
    "ImageChatFiles",
    "ImageFolder",
    "OnBadRow",
    "Packable",
    "PackingStrategy",
    "PictureFit",
    "RowFiles",
    "StdlibText",
    "Templated",
    "Text",
    "TextFiles",
    "TokenDtype",
    "TokenFiles",
    "Tokenised",
    "TrainOn",
]
