"""`decode="native"` over an ImageFolder: torch's batches, crops, flips and errors, by other pixels' makers.

Where torchvision is not installed (there is no build of it for the processor alone), `standins` has classes
of its names, written from its documentation.
"""

import importlib.util
import logging
import pickle
import random
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.plane.test_images import KINDS, encoded, picture
from torch.utils import data as torch_data

import headrace
from headrace import _native
from headrace.frameworks.torch.dropin.pictures import NativePictures
from headrace.frameworks.torch.dropin.transforms import Cut, plan_of
from headrace.torch import DataLoader

from .dropin_compare import epochs, randomness, seed

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
MAKERS = [
    KINDS["jpeg 4:2:0"], KINDS["png"], KINDS["webp"], KINDS["jpeg, grey"], KINDS["png, alpha"],
    lambda im: encoded(im, "BMP"),  # which native code does not decode
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def torchvision():
    assert "torchvision" not in sys.modules
    if importlib.util.find_spec("torchvision") is not None:
        from torchvision.transforms import v2

        yield sys.modules["torchvision"]
        return
    folder = str(Path(__file__).parent / "standins")
    sys.path.insert(0, folder)
    try:
        from torchvision.transforms import v2  # noqa: F401

        yield sys.modules["torchvision"]
    finally:
        sys.path.remove(folder)
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for i in range(26):
        (folder / f"class{i % 3}").mkdir(exist_ok=True)
        data = MAKERS[i % len(MAKERS)](picture(60 + 7 * i, 150 - 4 * i, i))
        (folder / f"class{i % 3}" / f"{i:02d}.jpg").write_bytes(data)
    return folder


def pipelines(torchvision):
    t, v2 = torchvision.transforms, torchvision.transforms.v2
    bicubic, bilinear = t.InterpolationMode.BICUBIC, t.InterpolationMode.BILINEAR
    return {
        "train": [
            t.RandomResizedCrop(32), t.RandomHorizontalFlip(), t.ToTensor(), t.Normalize(MEAN, STD),
        ],
        "evaluate": [t.Resize(48), t.CenterCrop(40), t.PILToTensor()],
        "flips first": [
            t.RandomVerticalFlip(0.6), t.RandomHorizontalFlip(0.4), t.Resize([40, 30], bicubic),
            t.RandomCrop((20, 24)), t.ToTensor(),
        ],
        "v2": [
            v2.ToImage(), v2.ToDtype(torch.uint8, scale=True), v2.RandomResizedCrop((24, 30)),
            v2.RandomHorizontalFlip(0.7), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD),
        ],
        "v2, crops": [
            t.CenterCrop((50, 44)), v2.RandomCrop((44, 40)), v2.ToImage(), v2.ToPureTensor(),
            t.ConvertImageDtype(torch.float32), t.RandomVerticalFlip(),
        ],
        "padded": [t.CenterCrop(120), t.RandomHorizontalFlip(), t.ToTensor()],
        "nested": [t.Compose([t.Resize((30, 30))]), torch.nn.Sequential(t.RandomVerticalFlip()), t.ToTensor()],
        "jitter": [t.RandomResizedCrop(32), t.RandomHorizontalFlip(), t.ColorJitter(0.4), t.ToTensor()],
        "jitter, tensor": [t.RandomResizedCrop(32), t.ToTensor(), t.ColorJitter(0.4), t.Normalize(MEAN, STD)],
        "cifar": [t.Resize((32, 40)), t.RandomCrop(32, padding=4), t.RandomHorizontalFlip(), t.ToTensor()],
        "cifar, v2": [
            v2.RandomHorizontalFlip(), t.Resize((32, 32)), v2.RandomCrop(32, padding=[4, 4]), v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD), v2.RandomErasing(0.7, value=0.5),
        ],
        "pad": [
            t.Pad(3), t.RandomVerticalFlip(), t.RandomCrop((50, 66)), t.PILToTensor(), t.RandomErasing(0.6),
        ],
        "pad first": [t.Pad((20,)), t.Resize((30, 30)), t.ToTensor()],
        "simclr": [
            t.RandomResizedCrop(32), t.ColorJitter(0.4, 0.4, 0.4, 0.1), t.RandomGrayscale(0.4),
            t.RandomHorizontalFlip(), t.ToTensor(), t.Normalize(MEAN, STD),
            t.RandomErasing(0.5, value="random"),
        ],
        "randaugment": [
            t.RandomResizedCrop(32), t.RandomHorizontalFlip(), t.RandAugment(), t.ColorJitter(hue=0.3),
            t.ToTensor(),
        ],
        "trivialaugment": [t.CenterCrop((90, 40)), t.TrivialAugmentWide(), t.PILToTensor()],
        "augment, v2": [
            v2.RandomResizedCrop((33, 48)), v2.RandAugment(3, 15), v2.TrivialAugmentWide(),
            v2.ColorJitter(0.3, 0.1, 0.5, 0.2), v2.ToImage(), v2.RandomErasing(0.8, scale=(0.5, 1.0)),
            v2.ToPureTensor(),
        ],
        "reference": [  # torchvision's own, with RandAugment
            t.RandomResizedCrop(32, interpolation=bilinear), t.RandomHorizontalFlip(),
            t.RandAugment(interpolation=bilinear, magnitude=14), t.PILToTensor(),
            t.ConvertImageDtype(torch.float32), t.Normalize(MEAN, STD), t.RandomErasing(0.6),
            t.RandomErasing(0.6, value="random"),
        ],
        "auto": [t.RandomResizedCrop((40, 31)), t.AutoAugment(interpolation=bilinear), t.PILToTensor()],
        "auto, v2": [
            v2.RandomResizedCrop((40, 31)), v2.AutoAugment(), v2.TrivialAugmentWide(interpolation=bilinear),
            v2.RandomHorizontalFlip(), v2.ToImage(),
        ],
        "views": [  # SimCLR's, with its blur, and BYOL's solarization
            t.RandomResizedCrop(48), t.RandomHorizontalFlip(),
            t.RandomApply([t.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8), t.RandomGrayscale(0.2),
            t.RandomApply([t.GaussianBlur(5, (0.1, 2.0))], p=0.5), t.RandomSolarize(128, 0.3), t.PILToTensor(),
        ],
        "views, v2": [
            v2.RandomResizedCrop((48, 32)), v2.RandomApply([v2.GaussianBlur((7, 3)), v2.RandomSolarize(99.5)]),
            v2.Grayscale(3), v2.ToImage(), v2.RandomHorizontalFlip(), v2.GaussianBlur(9, 3.0),
            v2.ToDtype(torch.float32, scale=True),
        ],
        "turned": [
            t.Resize((40, 52)), t.RandomRotation(20), t.RandomVerticalFlip(), t.RandomHorizontalFlip(),
            v2.RandomRotation((-90, 90), interpolation=bilinear), t.PILToTensor(),
        ],
        "affine": [
            t.Resize((40, 52)),
            t.RandomAffine(30, (0.1, 0.2), (0.7, 1.4), 10, interpolation=bilinear),
            v2.RandomAffine((-9, 5), shear=(-5, 5, 3, 9), center=(3, 9), interpolation=bilinear),
            t.RandomHorizontalFlip(), t.PILToTensor(),
        ],
        "operators": [
            t.Resize((30, 41)), t.RandomInvert(), t.RandomPosterize(3), t.RandomAdjustSharpness(2.5),
            t.RandomAutocontrast(), t.RandomEqualize(0.3), t.RandomHorizontalFlip(), t.PILToTensor(),
        ],
        "calm function": [t.Resize((30, 30)), t.RandomHorizontalFlip(), np.array],
    }  # fmt: skip


NAMES = (
    "train", "evaluate", "flips first", "v2", "v2, crops", "padded", "nested", "jitter",
    "jitter, tensor", "cifar", "cifar, v2", "pad", "pad first", "simclr", "randaugment", "trivialaugment",
    "augment, v2", "reference", "auto", "auto, v2", "views", "views, v2", "turned", "affine", "operators",
    "calm function",
)  # fmt: skip


def drawing_target(target):
    return target + torch.rand(1).item()


def levels_apart(a, b):
    """Levels of 255 between two tensors; by the smallest deviation of a Normalize, if they have one."""
    scale = 1 if a.dtype == torch.uint8 else 255 * (min(STD) if a.min() < 0 else 1)
    return ((a.double() - b.double()).abs() * scale).max().item()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_batches_are_those_of_torchs_own_loader(torchvision, photos, name, num_workers):
    """In labels, order, crops and flips, which noise would tell from others; and the generators go on alike."""
    transform = torchvision.transforms.Compose(pipelines(torchvision)[name])
    target = drawing_target if name in ("v2", "calm function") else str

    def case():
        return torchvision.datasets.ImageFolder(photos, transform, target), {}

    options = {"batch_size": 8, "shuffle": True, "num_workers": num_workers}
    expected, theirs = epochs(torch_data.DataLoader, case, **options)
    got, ours = epochs(DataLoader, case, **options, decode="native")
    assert ours == theirs
    most = 2 if name.startswith("jitter") else 1  # brightness makes more of a level
    for (pixels, labels), (expected_pixels, expected_labels) in zip(
        chain(*got), chain(*expected), strict=True
    ):
        assert type(pixels) is type(expected_pixels)
        assert pixels.dtype == expected_pixels.dtype
        assert pixels.shape == expected_pixels.shape
        assert (
            torch.equal(torch.as_tensor(labels), torch.as_tensor(expected_labels))
            if (torch.is_tensor(labels))
            else labels == expected_labels
        )
        assert levels_apart(pixels, expected_pixels) <= most + 1e-4


class TwoCropsTransform:
    """A stand-in for MoCo's and SimCLR's: one pipeline, two views."""

    def __init__(self, base_transform):
        self.base_transform = base_transform

    def __call__(self, x):
        q = self.base_transform(x)
        k = self.base_transform(x)
        return [q, k]


class TwoPipelines(torch.nn.Module):
    """A stand-in for BYOL's and VICReg's: two pipelines, a tuple of the later one's view first."""

    def __init__(self, transform, transform_prime):
        super().__init__()
        self.each = {"a": transform, "b": transform_prime}

    def forward(self, sample):
        first = self.each["a"](sample)
        return self.each["b"](sample), first


class MultiCrop:
    """A stand-in for DINO's: two large views and some small ones, which objects within it make."""

    def __init__(self, first, second, local, count):
        self.global_transfo1, self.global_transfo2 = first, second
        self.locals = [TwoCropsTransform(local)] * (count // 2)

    def __call__(self, image):
        crops = [self.global_transfo1(image), self.global_transfo2(image)]
        for each in self.locals:
            crops.extend(each(image))
        return crops


def multi_views(torchvision):
    t = torchvision.transforms
    lines = pipelines(torchvision)
    alike, small = (
        t.Compose(lines["views"]),
        [t.RandomResizedCrop(17, (0.05, 0.4)), *lines["views"][1:]],
    )
    python = [t.RandomResizedCrop(20), t.RandomHorizontalFlip(), t.ToTensor(), t.ColorJitter(0.2)]
    return {
        "two crops": TwoCropsTransform(alike),
        "two pipelines": TwoPipelines(t.Compose(lines["train"]), t.Compose(lines["augment, v2"])),
        "multi-crop": MultiCrop(alike, t.Compose(lines["reference"]), t.Compose(small), 6),
        "drawing afterwards": TwoPipelines(t.Compose(python), t.Compose(lines["evaluate"])),
        "beyond the edges": TwoPipelines(t.Compose(lines["padded"]), t.Compose(lines["pad"])),
        "one": t.Compose([TwoCropsTransform(t.Compose([t.CenterCrop(30), t.ToTensor()]))]),
    }  # fmt: skip


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "name",
    ["two crops", "two pipelines", "multi-crop", "drawing afterwards", "beyond the edges", "one"],
)
def test_several_views_of_a_picture_are_torchs(torchvision, photos, name, num_workers):
    """Each view's crop, flips and augmentations, in the order in which its object makes them."""

    def case():
        transform = multi_views(torchvision)[name]
        return torchvision.datasets.ImageFolder(photos, transform, drawing_target), {}

    options = {"batch_size": 8, "shuffle": True, "num_workers": num_workers}
    expected, theirs = epochs(torch_data.DataLoader, case, **options)
    got, ours = epochs(DataLoader, case, **options, decode="native")
    assert ours == theirs
    for (views, labels), (expected_views, expected_labels) in zip(
        chain(*got), chain(*expected), strict=True
    ):
        assert torch.equal(labels, expected_labels)
        assert type(views) is type(expected_views)
        for pixels, wanted in zip(views, expected_views, strict=True):
            assert pixels.shape == wanted.shape
            assert levels_apart(pixels, wanted) <= 2 + 1e-4


def test_a_picture_of_several_views_is_decoded_once(torchvision, photos):
    pictures = NativePictures(
        torchvision.datasets.ImageFolder(photos, multi_views(torchvision)["multi-crop"])
    )
    assert [len(views) for views, _ in pictures.__getitems__(range(5))] == [8] * 5
    assert pictures._pool.stats()["samples"] == 5
    line = pictures.explain(0)
    assert line.startswith('decode="native": MultiCrop\'s 8 views (1 by RandomResizedCrop(48), ')
    assert "; 6 by RandomResizedCrop(17), " in line


class Bent(TwoCropsTransform):
    """A stand-in for objects that do more than give the picture to their pipelines."""

    def __init__(self, transform, call):
        super().__init__(transform)
        self.call, self.random, self.calls = call, random.Random(1), 0

    def __call__(self, x):
        return globals()[self.call](self, x)


def looks(one, x):
    return [one.base_transform(x) for _ in range(1 + (x.size[0] > 100))]


def hides(one, x):
    try:
        return [one.base_transform(x.convert("RGB"))]
    except Exception:  # noqa: BLE001
        return [one.base_transform(x)]


def draws(one, x):
    return [one.base_transform(x) for _ in range(1 + (random.random() < 0.5))]


def draws_itself(one, x):
    return [one.base_transform(x) for _ in range(1 + (one.random.random() < 0.5))]


def counts(one, x):
    one.calls += 1
    return [one.base_transform(x)] * 1


def stacks(one, x):
    return torch.stack([one.base_transform(x), one.base_transform(x)])


def repeats(one, x):
    return [one.base_transform(x)] * 2


def names(one, x):
    return {"view": one.base_transform(x)}


def chains(one, x):
    return [one.base_transform(one.base_transform(x))]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("looks", "Bent does more with a picture than give it to transforms .*it asks for size"),
        ("hides", "it asks for convert"),
        ("draws", "Bent draws numbers of its own"),
        ("draws_itself", "it asks for random"),
        ("counts", "Bent changes as it is called"),
        ("stacks", "does more with a picture"),
        ("repeats", "Bent returns something else"),
        ("names", "Bent returns something else"),
        ("chains", "a transform gets something else"),
    ],
)
def test_views_that_may_be_made_otherwise_are_torchs(torchvision, photos, call, why):
    t = torchvision.transforms
    dataset = torchvision.datasets.ImageFolder(
        photos, Bent(t.Compose([t.CenterCrop(9), t.ToTensor()]), call)
    )
    loader = DataLoader(dataset, 1, decode="native", collate_fn=len)
    seed()
    before = randomness()
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(loader.explain())
    assert randomness() == before
    assert dataset.transform.calls == 0


def test_a_view_that_is_not_known_is_named(torchvision, photos):
    t = torchvision.transforms
    known = t.Compose([t.CenterCrop(9), t.ToTensor()])
    unknown = t.Compose([t.TrivialAugmentWide(), t.CenterCrop(9)])
    dataset = torchvision.datasets.ImageFolder(photos, TwoPipelines(known, unknown))
    assert "in view 2 of TwoPipelines TrivialAugmentWide, which it does not know" in (
        DataLoader(dataset, 1, decode="native").explain()
    )


def test_cuts_are_pillows_crop_and_resize(torchvision):
    """For every filter, order of crops and flips, and size of picture."""
    t = torchvision.transforms
    pool = _native.DecodePool(1, 0)
    seed()
    for i in range(100):
        modes = t.InterpolationMode
        mode = (modes.BILINEAR, modes.BICUBIC, modes.BOX, modes.HAMMING, modes.LANCZOS)[i % 5]
        sizes = ([90, 77], 85, (200, 60))
        steps = [
            [t.RandomCrop((60, 50)), t.CenterCrop(50), t.RandomHorizontalFlip()][: i % 4],
            [t.Resize(sizes[i % 3], mode), t.RandomResizedCrop((70, 60), interpolation=mode)][i % 2],
            [t.RandomVerticalFlip(), t.RandomCrop((50, 40)), t.RandomHorizontalFlip(), t.CenterCrop(33)],
        ]  # fmt: skip
        if mode is t.InterpolationMode.BOX:  # what was mirrored before is not taken over
            steps[0] = steps[0][:2]
        plan = plan_of(t.Compose([*steps[0], steps[1], *steps[2]]))
        assert not plan.after
        im = picture(60 + 3 * i, 300 - 2 * i, i)
        cut = Cut(plan, *im.size)
        expected = im
        for method, arguments in cut.steps:
            expected = getattr(expected, method)(*arguments)
        job = pool.submit_given(
            [plan.images.recipe()], (encoded(im, "PNG"),), np.array([cut.given], np.int32)
        )
        assert job.wait(30)
        assert not job.failures
        ours = job.pixels.reshape(plan.images.shape).astype(int)
        assert np.abs(ours - np.asarray(expected)).max() <= 1


def test_augmentations_are_taken_over_where_native_code_does_the_same(torchvision):
    t, v2 = torchvision.transforms, torchvision.transforms.v2
    for name in NAMES[9:25]:
        assert not plan_of(t.Compose(pipelines(torchvision)[name])).after, name
    bicubic = t.InterpolationMode.BICUBIC
    for steps, left in [
        ([t.ColorJitter(0.1), t.RandomVerticalFlip(), t.ToTensor()], []),
        (
            [t.RandAugment(), t.RandomVerticalFlip(), t.ToTensor()],
            [],
        ),
        ([t.ColorJitter(0.1), t.CenterCrop(9)], ["CenterCrop"]),
        ([t.RandAugment(interpolation=bicubic)], ["RandAugment"]),
        ([t.RandomApply([t.ColorJitter(0.1), t.CenterCrop(9)])], ["RandomApply"]),
        ([t.RandomApply([abs])], ["RandomApply"]),
        ([t.Grayscale()], ["Grayscale"]),
        ([t.GaussianBlur(81)], ["GaussianBlur"]),
        ([t.ToTensor(), t.GaussianBlur(3)], ["GaussianBlur"]),
        ([t.RandomRotation(9, expand=True)], ["RandomRotation"]),
        ([t.RandomRotation(9, center=(1, 1))], ["RandomRotation"]),
        ([t.RandomAffine(9, fill=3)], ["RandomAffine"]),
        ([t.PILToTensor(), t.RandomErasing(), t.GaussianBlur(3)], ["GaussianBlur"]),
        ([v2.TrivialAugmentWide(fill=128)], ["TrivialAugmentWide"]),
        ([v2.ToImage(), v2.ColorJitter(0.1)], ["ColorJitter"]),
        ([t.ToTensor(), t.RandomErasing(), t.Normalize(MEAN, STD)], ["Normalize"]),
        ([t.ToTensor(), t.Normalize(MEAN, STD), t.RandomCrop(30, padding=2)], ["RandomCrop"]),
        ([t.RandomErasing(), t.ToTensor()], ["RandomErasing", "ToTensor"]),
    ]:
        plan = plan_of(t.Compose([t.Resize((40, 40)), *steps]))
        assert [type(one).__name__ for one in plan.after] == left


def loaders(torchvision, folder, transform, **options):
    dataset = torchvision.datasets.ImageFolder(folder, torchvision.transforms.Compose(transform))
    return (
        torch_data.DataLoader(dataset, **options),
        DataLoader(dataset, **options, decode="native"),
    )


def outcomes(loader):
    """Its batches, and errors in their places; then where the generators stand."""
    seed()
    batches, iterator = [], iter(loader)
    while True:
        try:
            batches.append([each.tolist() for each in next(iterator)])
        except StopIteration:
            return batches, randomness()
        except Exception as e:  # noqa: BLE001
            batches.append(type(e))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_files_are_torchs_errors_and_the_epoch_goes_on(torchvision, tmp_path, num_workers):
    """Unreadable, cut off, missing: the same exceptions, and the batches after them are torch's, too."""
    t = torchvision.transforms
    (tmp_path / "one").mkdir()
    for i in range(24):
        (tmp_path / "one" / f"{i:02d}.jpg").write_bytes(
            encoded(Image.new("RGB", (90, 80), (i, 9, 9)), "PNG")
        )
    files = sorted((tmp_path / "one").iterdir())
    files[2].write_bytes(b"no picture")
    files[9].write_bytes(encoded(picture(90, 80), "JPEG")[:-300])
    files[18].write_bytes(b"")
    transform = [t.RandomCrop(64), t.RandomHorizontalFlip(), t.ToTensor()]
    theirs, ours = loaders(torchvision, tmp_path, transform, batch_size=4, num_workers=num_workers)
    files[20].unlink()
    expected = outcomes(theirs)
    assert sum(isinstance(batch, type) for batch in expected[0]) == 4
    assert outcomes(ours) == expected
    with pytest.raises(OSError) as e:
        NativePictures(ours.dataset).__getitems__([8, 9])
    assert "09.jpg either: the file is cut off" in e.value.__notes__[0]


def test_a_file_that_pillow_forgives_is_decoded_by_it(torchvision, tmp_path, caplog, monkeypatch):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.jpg").write_bytes(encoded(picture(90, 80), "JPEG")[:-400])
    monkeypatch.setattr("PIL.ImageFile.LOAD_TRUNCATED_IMAGES", True)
    t = torchvision.transforms
    theirs, ours = loaders(torchvision, tmp_path, [t.Resize((50, 40)), t.PILToTensor()])
    ((expected, _),), ((pixels, _),) = list(theirs), list(ours)
    assert levels_apart(pixels, expected) <= 1
    assert "Pillow decodes what" in caplog.text


def test_what_was_taken_over_is_said_once_and_explained(torchvision, photos, caplog):
    t = torchvision.transforms
    caplog.set_level(logging.INFO, "headrace.torch")
    transform = [*pipelines(torchvision)["train"][:3], t.ColorJitter(0.1), t.Normalize(MEAN, STD)]
    _, loader = loaders(torchvision, photos, transform, batch_size=13)
    list(loader), list(loader)
    (line,) = [each.message for each in caplog.records if " run in " in each.message]
    assert line in loader.explain()
    first, _, rest = line.partition(" native thread")
    assert first.rpartition(" ")[0] == (
        'decode="native": RandomResizedCrop(32), RandomHorizontalFlip, ToTensor run in'
    )
    assert rest.endswith("; ColorJitter, Normalize run after them in Python")
    with_workers = DataLoader(loader.dataset, 4, num_workers=2, decode="native")
    assert "run in 2 workers, " in with_workers.explain()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: [t.ColorJitter(0.1), t.CenterCrop(9)], "ColorJitter, which it does not know, comes before"),
        (lambda t: [t.Resize(20), lambda im: im, t.CenterCrop(9)], "<lambda>, which it does not know"),
        (lambda t: [t.RandomCrop(40, padding=2, fill=3)], r"RandomCrop\(40\), which"),
        (lambda t: [t.RandomCrop(40, padding=(2, 3))], r"RandomCrop\(40\), which"),
        (lambda t: [t.Pad(2, padding_mode="edge"), t.CenterCrop(9)], "Pad, which"),
        (lambda t: [t.TrivialAugmentWide(), t.CenterCrop(9)], "TrivialAugmentWide, which"),
        (lambda t: [t.Resize((9, 9), t.InterpolationMode.NEAREST)], r"Resize\(9\), which"),
        (lambda t: [t.PILToTensor(), t.Resize((9, 9), antialias=False)], r"Resize\(9\), which"),
        (lambda t: [t.RandomVerticalFlip(), t.Resize((9, 9), t.InterpolationMode.BOX)], r"Resize\(9\), which"),
        (lambda t: [t.ToTensor()], "different sizes"),
        (lambda t: [t.Resize(30), t.ToTensor()], "different sizes"),
        (lambda _: [], "different sizes"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_over_stays_off_and_says_why(torchvision, photos, change, why, caplog):
    t = torchvision.transforms
    dataset = torchvision.datasets.ImageFolder(photos, t.Compose(change(t)))
    loader = DataLoader(dataset, 1, decode="native", collate_fn=len)
    assert list(loader) == [1] * 26
    assert caplog.text.count('decode="native": off, because') == 1
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(loader.explain())


def test_data_sets_that_are_not_recognised_are_refused(torchvision, photos, tmp_path):
    folder = torchvision.datasets.ImageFolder

    class Mine(folder):
        def __getitem__(self, index):
            return index

    class Several(folder):
        def __getitems__(self, indices):
            return indices

    class Odd(torch_data.Subset):
        pass

    class Stream(torch_data.IterableDataset):
        def __iter__(self):
            return iter(())

    def load(path):
        return Image.open(path)

    for dataset, why in [
        (
            Mine(photos),
            "the data set, .*Mine, makes its samples by a __getitem__ that is not torchvision",
        ),
        (Several(photos), "makes its samples"),
        (folder(photos, loader=load), "loads its files by .*load"),
        (Odd(folder(photos), [1]), "makes its samples"),
        (torch_data.TensorDataset(torch.zeros(3)), "makes its samples.*or leave decode= out"),
        (Stream(), "is iterable"),
    ]:
        with pytest.raises(ValueError, match=f'decode="native": .*{why}'):
            DataLoader(dataset, decode="native")
    with pytest.raises(ValueError, match="decode is 'fast', expected 'native'"):
        DataLoader(folder(photos), decode="fast")
    with pytest.raises(ValueError, match=r"give a store's loader decode=headrace.Images"):
        DataLoader(photos, 4, decode="native")
    with pytest.raises(ValueError, match=r"decode is of type Images, .*is for stores"):
        DataLoader(folder(photos), decode=headrace.Images(size=8))
    with pytest.raises(TypeError, match=r"seed: of stores alone, .*generator="):
        DataLoader(folder(photos), seed=7)


def test_subsets_samplers_single_samples_and_own_collate(torchvision, photos):
    t = torchvision.transforms
    whole = torchvision.datasets.ImageFolder(photos, t.Compose([t.Resize((20, 20)), t.ToTensor()]))
    part = torch_data.Subset(torch_data.Subset(whole, range(3, 20)), [5, 2, 11])
    for options in (
        {"batch_size": 2}, {"batch_size": None}, {"sampler": [2, 0]}, {"collate_fn": lambda each: each},
    ):  # fmt: skip
        theirs = list(torch_data.DataLoader(part, **options))
        ours = list(DataLoader(part, **options, decode="native"))
        assert str(ours)[:20] == str(theirs)[:20]
        flat = torch.utils._pytree.tree_leaves
        for a, b in zip(flat(ours), flat(theirs), strict=True):
            assert (
                a == b
                if isinstance(a, int)
                else torch.allclose(a.double(), b.double(), atol=1.01 / 255)
            )


def test_transforms_may_be_changed_between_epochs(torchvision, photos):
    t = torchvision.transforms
    dataset = torchvision.datasets.ImageFolder(
        photos, t.Compose([t.Resize((20, 20)), t.ToTensor()])
    )
    loader = DataLoader(dataset, 26, decode="native")
    ((before, _),) = loader
    dataset.transform.transforms[0].size = (30, 10)
    ((after, _),) = loader
    dataset.transform = t.Compose([t.CenterCrop(12), t.PILToTensor()])
    ((other, _),) = loader
    assert [x.shape[2:] for x in (before, after, other)] == [(20, 20), (30, 10), (12, 12)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_epoch_goes_on_with_the_same_crops(torchvision, photos, num_workers):
    options = {"batch_size": 4, "shuffle": True, "num_workers": num_workers}
    seed()
    _, first = loaders(torchvision, photos, pipelines(torchvision)["jitter"], **options)
    iterator = iter(first)
    next(iterator), next(iterator)
    state = first.state_dict()
    rest = list(iterator)
    seed(99)
    _, second = loaders(torchvision, photos, pipelines(torchvision)["jitter"], **options)
    second.load_state_dict(state)
    for (a, labels), (b, expected) in zip(second, rest, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(labels, expected)


def seen_dataset(worker_id):
    assert type(torch_data.get_worker_info().dataset).__name__ == "ImageFolder"


def test_workers_see_the_users_data_set_and_it_travels_by_pickle(torchvision, photos):
    _, loader = loaders(
        torchvision, photos, pipelines(torchvision)["evaluate"], batch_size=9, num_workers=1,
        worker_init_fn=seen_dataset,
    )  # fmt: skip
    assert sum(len(labels) for _, labels in loader) == 26
    assert type(loader.dataset).__name__ == "ImageFolder"
    pictures = NativePictures(loader.dataset)
    ((pixels, _),) = pictures.__getitems__([4])
    copy = pickle.loads(pickle.dumps(pictures))
    assert torch.equal(copy[4][0], pixels)


def test_accelerate_keeps_it(torchvision, photos):
    accelerate = pytest.importorskip("accelerate")
    _, loader = loaders(
        torchvision, photos, pipelines(torchvision)["train"], batch_size=13, shuffle=True
    )
    prepared = accelerate.Accelerator(cpu=True).prepare(loader)
    assert prepared.base_dataloader.explain().startswith('decode="native": RandomResizedCrop(32)')
    assert [tuple(pixels.shape) for pixels, _ in prepared] == [(13, 3, 32, 32)] * 2
