"""Five small trainings as people write them, with plain PyTorch on the processor; nothing here knows headrace.

    python small_trainings.py write images DIR     # the data of one, made up and seeded
    python small_trainings.py train images DIR     # trains on it; prints the losses' ends

images: a folder of JPEG for a small CNN. volumes: an npz for each volume, for a 3-D convolution. table: Parquet
files, one after the other, for an MLP. text: lines of a JSONL file by their offsets, for a byte model. audio:
WAV files, for a model of their spectra. Contents are synthetic, but the text is the standard library's sources.
"""

import argparse
import json
import sysconfig
import wave
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


def write_images(root, random):
    for i in range(480):
        width, height = random.integers(160, 420, 2)
        coarse = random.integers(0, 255, (9, 9, 3), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        noise = random.normal(0, 9, (height, width, 3))
        path = root / f"{'abcd'[i % 4]}/{i:05d}.jpg"
        path.parent.mkdir(exist_ok=True)
        noisy = np.clip(np.asarray(picture) + noise, 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(path, quality=int(random.integers(70, 96)))


def write_volumes(root, random):
    for i in range(120):
        sides = random.integers(36, 60, 3)
        volume = random.normal(0, 1, sides).astype(np.float32)
        np.savez(root / f"case_{i:03d}.npz", volume=volume, label=np.int64(i % 2))


def write_table(root, random):
    for i in range(40):
        rows = int(random.integers(12_000, 24_000))
        columns = {f"x{c}": random.normal(0, 1, rows).astype(np.float32) for c in range(24)}
        columns["y"] = random.integers(0, 2, rows).astype(np.int8)
        pq.write_table(pa.table(columns), root / f"part-{i:04d}.parquet")


def write_text(root, random):
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    sources = [path for path in sources if "site-packages" not in path.parts]
    paragraphs = [p for path in sources for p in path.read_text("utf-8", "replace").split("\n\n\n")]
    paragraphs = [p for p in paragraphs if len(p) > 200]
    offsets = []
    with open(root / "text.jsonl", "wb") as f:
        for at in random.permutation(len(paragraphs))[:4000].tolist():
            offsets.append(f.tell())
            f.write(json.dumps({"text": paragraphs[at]}).encode() + b"\n")
    np.save(root / "offsets.npy", np.array(offsets))


def write_audio(root, random):
    for i in range(400):
        count = int(random.integers(14_000, 50_000))
        pitch = random.uniform(90, 900)
        tone = np.sin(np.arange(count) * pitch * 2 * np.pi / 16_000) + random.normal(0, 0.3, count)
        path = root / f"{'ab'[pitch > 400]}/{i:05d}.wav"
        path.parent.mkdir(exist_ok=True)
        with wave.open(str(path), "wb") as f:
            f.setnchannels(1)
            f.setsampwidth(2)
            f.setframerate(16_000)
            f.writeframes((tone * 8000).astype("<i2").tobytes())


class Files(Dataset):
    """Whole files, each opened by `load`."""

    def __init__(self, root, ending):
        self.paths = sorted(Path(root).rglob("*" + ending))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        return self.load(self.paths[i])


class Images(Files):
    def load(self, path):
        with Image.open(path) as picture:
            pixels = np.asarray(picture.convert("RGB").resize((96, 96)))
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255, "abcd".index(
            path.parent.name
        )


class Volumes(Files):
    def load(self, path):
        with np.load(path) as archive:
            volume, label = archive["volume"], int(archive["label"])
        corner = [int(torch.randint(0, side - 31, ())) for side in volume.shape]
        a, b, c = (slice(at, at + 32) for at in corner)
        return torch.from_numpy(volume[a, b, c].copy())[None], label


class Audio(Files):
    def load(self, path):
        with wave.open(str(path)) as f:
            samples = np.frombuffer(f.readframes(f.getnframes()), "<i2").astype(np.float32)
        window = torch.hann_window(512)
        spectrum = torch.stft(
            torch.from_numpy(samples), 512, 256, window=window, return_complex=True
        )
        return spectrum.abs().log1p()[:, :48], "ab".index(path.parent.name)


class Text(Dataset):
    """Lines of a file by their offsets; each worker opens it for itself."""

    def __init__(self, root):
        self.path, self.file = Path(root, "text.jsonl"), None
        self.offsets = np.load(Path(root, "offsets.npy"))

    def __len__(self):
        return len(self.offsets)

    def __getitem__(self, i):
        self.file = self.file or open(self.path, "rb")
        self.file.seek(int(self.offsets[i]))
        text = json.loads(self.file.readline())["text"].encode()[:128].ljust(128, b"\0")
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        return tokens[:-1], tokens[1:]


def table_batches(root, epoch, size=2000):
    """Batches of rows, file after file: as the job has no workers, it waits for each."""
    paths = sorted(Path(root).glob("*.parquet"))
    for at in np.random.default_rng(epoch).permutation(len(paths)).tolist():
        table = pq.read_table(paths[at])
        x = torch.from_numpy(np.stack([table[f"x{c}"].to_numpy() for c in range(24)], axis=1))
        y = torch.from_numpy(table["y"].to_numpy().astype(np.int64))
        for begin in range(0, len(x), size):
            yield x[begin : begin + size], y[begin : begin + size]


class ByteModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(256, 32), nn.LSTM(32, 48, batch_first=True)
        self.out = nn.Linear(48, 256)

    def forward(self, tokens):
        return self.out(self.lstm(self.embed(tokens))[0]).transpose(1, 2)


def cnn(dims, channels, classes):
    conv, pool = (
        (nn.Conv2d, nn.AdaptiveAvgPool2d) if dims == 2 else (nn.Conv3d, nn.AdaptiveAvgPool3d)
    )
    return nn.Sequential(
        conv(channels, 12, 3, stride=2, padding=1), nn.ReLU(), conv(12, 24, 3, stride=2, padding=1),
        nn.ReLU(), pool(1), nn.Flatten(), nn.Linear(24, classes),
    )  # fmt: skip


def mlp():
    return nn.Sequential(
        nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 2)
    )


def spectral():
    return nn.Sequential(
        nn.Conv1d(257, 96, 5, padding=2), nn.ReLU(), nn.Conv1d(96, 96, 5, padding=2), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(96, 2),
    )  # fmt: skip


WRITE = {
    "images": write_images, "volumes": write_volumes, "table": write_table, "text": write_text,
    "audio": write_audio,
}  # fmt: skip
DATA = {
    "images": (lambda root: Images(root, ".jpg"), 16),
    "volumes": (lambda root: Volumes(root, ".npz"), 4),
    "text": (Text, 40),
    "audio": (lambda root: Audio(root, ".wav"), 16),
}
MODEL = {
    "images": lambda: cnn(2, 3, 4), "volumes": lambda: cnn(3, 1, 2), "table": mlp,
    "text": ByteModel, "audio": spectral,
}  # fmt: skip


def train(kind, root, epochs, workers):
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = MODEL[kind]()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loss_of = nn.CrossEntropyLoss()
    loader = None
    if kind != "table":
        data_of, batch = DATA[kind]
        loader = DataLoader(data_of(root), batch, shuffle=True, num_workers=workers, drop_last=True)
    for epoch in range(epochs):
        last = 0.0
        for x, y in loader if loader is not None else table_batches(root, epoch):
            loss = loss_of(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            last = float(loss.detach())
        print(f"{kind}: epoch {epoch}, loss {last:.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["write", "train"])
    parser.add_argument("kind", choices=list(WRITE))
    parser.add_argument("root", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if options.what == "write":
        options.root.mkdir(parents=True)
        WRITE[options.kind](options.root, np.random.default_rng(5))
    else:
        train(options.kind, options.root, options.epochs, options.workers)


if __name__ == "__main__":
    main()
