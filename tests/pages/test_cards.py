"""How loaders, stores and runs look in a notebook: escaped, small, self-contained; nothing is asked for it."""

import re
from html.parser import HTMLParser

import pytest

import headrace as hr
from headrace.order import Subset
from headrace.pages.html import card
from headrace.trace import read_run
from traces.runs import made_run

HOSTILE = '<img src=x onerror=alert(1)>"\u202e'


class Tree(HTMLParser):
    """Counts tags, and refuses what is not closed."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(html):
    tree = Tree()
    tree.feed(html)
    assert not tree.open
    tags = {tag for tag, _ in tree.seen}
    assert tags <= {"div", "table", "tr", "th", "td"}
    assert all(set(attrs) <= {"style", "role", "aria-label"} for _, attrs in tree.seen)
    assert not re.search(r"https?:|url\(|\u202e", html)
    assert len(html) < 4000
    return re.sub(r"<[^>]*>", " ", html)


def test_a_loader_says_what_it_loads_and_where_it_stands(packed_photos):
    loader = hr.loader(packed_photos, 4, seed=7, rank=1, world_size=2)
    assert repr(loader) == (
        f"Loader('{packed_photos}', shuffled, seed 7, batch 4, rank 1 of 2 by arguments, epoch 0 at 0 of 36)"
    )
    assert "waited" not in checked(loader._repr_html_())
    next(iter(loader))
    card = checked(loader._repr_html_())
    assert "position 8 of 36" in card
    assert "1 batches, 4 samples" in card
    loader.close()


def test_what_a_url_keeps_secret_is_shown_nowhere(packed_photos, monkeypatch, capsys):
    monkeypatch.setenv("HEADRACE_VERDICT", "1")
    with hr.open(packed_photos) as store:
        loader = hr.loader(store, 4, seed=7)
        list(loader)
        store.path = "https://me:hidden@example.org/photos.hr?signature=hidden"
        list(loader)
        first, second = (line for line in capsys.readouterr().err.splitlines() if "epoch" in line)
        assert f"epoch 0 of {packed_photos.name} | 36 samples" in first
        assert "epoch 1 of photos.hr | 36 samples" in second
        for said in (second, repr(loader), checked(loader._repr_html_().replace("https:", ""))):
            assert "photos.hr" in said
            assert "hidden" not in said
        loader.close()


@pytest.mark.parametrize(("shuffle", "said"), [(False, "in the given order"), (True, "seed 7")])
def test_a_loader_over_some_samples_says_how_many_and_in_which_order(packed_photos, shuffle, said):
    loader = hr.loader(packed_photos, 4, order=Subset([7, 3, 9], 36, seed=7, shuffle=shuffle))
    assert f", subset of 3 of 36 samples, {said}, batch 4," in repr(loader)
    assert f"subset of 3 of 36 samples, {said} " in checked(loader._repr_html_())
    loader.close()


def test_windows_one_after_the_other_have_no_seed(tmp_path):
    hr.pack([bytes(80)] * 3, tmp_path / "tokens.hr")
    loader = hr.tokens(tmp_path / "tokens.hr", 8, 2, stored="uint16", shuffle=False)
    assert ", in the stored order, batch 2," in repr(loader)
    assert "seed" not in repr(loader)
    loader.close()


def test_torchs_loaders_do_likewise(packed_photos):
    torch = pytest.importorskip("torch")
    from headrace.torch import DataLoader

    loader = DataLoader(packed_photos, batch_size=4)
    assert repr(loader).startswith("StoreLoader(")
    assert "StoreLoader" in checked(loader._repr_html_())
    loader.close()

    class Slow(torch.utils.data.TensorDataset):
        def __len__(self):
            raise AssertionError("it was asked")

    dropin = DataLoader(Slow(torch.arange(8)), batch_size=2, sampler=range(8))
    assert repr(dropin).startswith("DataLoader(")
    assert "Slow, batch 2, 0 workers)" in repr(dropin)
    assert "Slow" in checked(dropin._repr_html_())
    list(dropin)
    assert "4 batches, 8 samples" in checked(dropin._repr_html_())


def test_a_store_shows_itself_without_a_look_at_the_storage(own_store):
    store = hr.open(own_store)
    for volume in own_store.glob("*.hrv"):
        volume.unlink()
    card = checked(store._repr_html_())
    assert "36" in card
    assert store.fingerprint in card
    store.close()
    assert "closed" in checked(store._repr_html_())


def test_a_run_shows_itself_in_a_line_and_as_a_card(tmp_path):
    made_run(tmp_path / "run", source=HOSTILE)
    run = read_run(tmp_path / "run")
    assert repr(run) == f"Run('{tmp_path / 'run'}', 2 ranks, 128 steps)"
    assert repr(run.ranks[1]) == "RankTrace(rank 1 of 2, 64 steps)"
    card = checked(run._repr_html_())
    assert "33" in card
    assert "2,000" in card


def test_whatever_a_card_is_told_stays_text():
    assert "onerror" in checked(card(HOSTILE, [(HOSTILE, HOSTILE)], waited=7.0, note=HOSTILE))
