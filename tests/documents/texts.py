"""Texts as a reader of the pages has them: JSON Lines in a folder, and a tokenizer that was trained on them.

python tests/documents/texts.py FOLDER TOKENIZER
"""

import json
import random
import sys
from pathlib import Path

WORDS = [
    "a",
    "stream",
    "of",
    "water",
    "drives",
    "the",
    "wheel",
    "and",
    "goes",
    "on",
    "to",
    "mills",
    "below",
]


def texts(count: int = 300) -> list[str]:
    """The same sentences each time."""
    dice = random.Random(5)
    return [" ".join(dice.choices(WORDS, k=dice.randrange(10, 120))) + "." for _ in range(count)]


def write_lines(folder: Path) -> None:
    """Two files of JSON Lines."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text, "id": i}) for i, text in enumerate(texts())]
    for k in range(2):
        (folder / f"{k}.jsonl").write_text("\n".join(lines[k::2]) + "\n")


def write_tokenizer(path: Path) -> None:
    """All bytes, and pairs of them."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(), Decoder()
    trainer = BpeTrainer(
        vocab_size=290, initial_alphabet=ByteLevel.alphabet(), special_tokens=["<|end|>"],
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.save(str(path))


if __name__ == "__main__":
    write_lines(Path(sys.argv[1]))
    write_tokenizer(Path(sys.argv[2]))
