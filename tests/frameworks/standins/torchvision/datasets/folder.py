"""A stand-in for torchvision.datasets.folder."""

from pathlib import Path

from PIL import Image


def pil_loader(path):
    with open(path, "rb") as f:  # noqa: PTH123
        return Image.open(f).convert("RGB")


def default_loader(path):
    return pil_loader(path)


class DatasetFolder:
    """A folder per class; samples are (path, number of the class)."""

    def __init__(self, root, loader=default_loader, transform=None, target_transform=None):
        self.root, self.loader = root, loader
        self.transform, self.target_transform = transform, target_transform
        self.classes = sorted(folder.name for folder in Path(root).iterdir())
        self.samples = [
            (str(path), label)
            for label, name in enumerate(self.classes)
            for path in sorted((Path(root) / name).iterdir())
        ]
        self.targets = [label for _, label in self.samples]

    def __getitem__(self, index):
        path, target = self.samples[index]
        sample = self.loader(path)
        if self.transform is not None:
            sample = self.transform(sample)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return sample, target

    def __len__(self):
        return len(self.samples)


class ImageFolder(DatasetFolder):
    def __init__(self, root, transform=None, target_transform=None, loader=default_loader):
        super().__init__(root, loader, transform, target_transform)
        self.imgs = self.samples
