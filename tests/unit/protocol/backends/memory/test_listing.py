"""DirectoryCookies: a scan sees what stays exactly once, whatever is added and removed beside it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protocol.directory_cookies import FIRST_COOKIE, AscendingCookies, DirectoryCookies, downward
from protocol.volume import COOKIE_END


class ListingMachine(RuleBasedStateMachine):
    """One listing that changes under several scans.  Each asks for a few names at a time."""

    @initialize(count=st.integers(0, 80))
    def begin(self, count: int) -> None:
        self.names = {b"%d" % at for at in range(count)}
        self.listing = DirectoryCookies(sorted(self.names))
        self.added = 0
        self.cookies = {name: cookie for cookie, name in self.listing.after(0)}
        # Of each scan: where it is, what it has seen, what was there all the time since it began, and what was there
        # when it read its first names.
        self.scans: list[tuple[int, list[bytes], set[bytes], set[bytes]]] = []

    @rule(count=st.integers(1, 40), again=st.booleans())
    def add(self, count: int, again: bool) -> None:
        for at in range(count):
            name = b"%d" % at if again else b"new%d" % self.added
            self.added += 1
            if name not in self.names:
                self.listing.add(name)
                self.names.add(name)

    @rule(first=st.integers(0, 80), count=st.integers(1, 80))
    def remove(self, first: int, count: int) -> None:
        for name in sorted(self.names)[first : first + count]:
            self.listing.remove(name)
            self.names.remove(name)
            self.scans = [(cookie, seen, stayed - {name}, began) for cookie, seen, stayed, began in self.scans]

    @rule()
    def start_a_scan(self) -> None:
        self.scans.append((0, [], set(self.names), set(self.names)))

    @rule(which=st.integers(0, 5), count=st.integers(1, 30))
    def go_on(self, which: int, count: int) -> None:
        if not self.scans:
            return
        cookie, seen, stayed, began = self.scans[which % len(self.scans)]
        began = began if cookie else set(self.names)
        for _, (at, name) in zip(range(count), self.listing.after(cookie), strict=False):
            assert at > cookie
            assert name in began
            cookie = at
            seen.append(name)
        self.scans[which % len(self.scans)] = (cookie, seen, stayed, began)

    @invariant()
    def lists_what_is_there_by_cookies_that_stay(self) -> None:
        listed = list(self.listing.after(0))
        assert sorted(name for _, name in listed) == sorted(self.names)
        assert [at for at, _ in listed] == sorted({at for at, _ in listed})
        assert all(at >= FIRST_COOKIE for at, _ in listed)
        assert len(self.listing) == len(self.names)

    def teardown(self) -> None:
        for cookie, seen, stayed, _ in getattr(self, "scans", []):
            everything = seen + [name for _, name in self.listing.after(cookie)]
            assert stayed <= set(everything), "a name that stayed was not seen"
            assert all(everything.count(name) == 1 for name in stayed), "a name that stayed was seen twice"


TestListing = ListingMachine.TestCase


def test_a_running_iterator_goes_on_when_gaps_are_closed() -> None:
    listing = DirectoryCookies(b"%03d" % at for at in range(200))
    running = listing.after(0)
    seen = [next(running)[1] for _ in range(150)]
    for name in seen:
        listing.remove(name)
    assert [name for _, name in running] == [b"%03d" % at for at in range(150, 200)]


def test_a_name_added_again_comes_first_and_a_cookie_is_never_given_twice() -> None:
    listing = DirectoryCookies([b"a", b"b"])
    cookies = {cookie for cookie, _ in listing.after(0)}
    listing.remove(b"b")
    listing.add(b"b")
    assert [name for _, name in listing.after(0)] == [b"b", b"a"]
    assert {cookie for cookie, name in listing.after(0) if name == b"b"}.isdisjoint(cookies)


@pytest.mark.parametrize("gaps", [0, 100])  # without and with a gap that was closed meanwhile
def test_a_name_that_is_put_back_stays_where_it_was(gaps: int) -> None:
    listing = DirectoryCookies(b"%03d" % at for at in range(150))
    before = [(cookie, name) for cookie, name in listing.after(0) if int(name) >= gaps]
    cookie = listing.cookie(b"120")
    for name in (*(b"%03d" % at for at in range(gaps)), b"120"):
        listing.remove(name)
    listing.add(b"120")
    listing.put_back(b"120", cookie)
    assert list(listing.after(0)) == before
    listing.add(b"new")
    assert next(listing.after(0))[1] == b"new"


@pytest.mark.parametrize("many", [20, 200])
def test_positions_stay_when_the_small_cookies_are_used_up_and_when_cookies_went_up_before(many: int) -> None:
    before = AscendingCookies([b"%03d" % at for at in range(many)])
    before.add(b"added")
    assert [cookie for cookie, _ in before.after(0)] == list(range(FIRST_COOKIE, FIRST_COOKIE + many + 1))
    *_, (position, _), _ = before.after(0)
    listing = downward(before, ())
    assert list(listing.after(0)) == list(before.after(0))
    running, seen = listing.after(FIRST_COOKIE), []
    for number, (_, name) in enumerate(running):
        seen.append(name)
        listing.add(b"new%d" % number)
    assert seen == [*(b"%03d" % at for at in range(1, many)), b"added"]
    assert [name for _, name in listing.after(position)] == [b"added"]
    everything = list(listing.after(0))
    assert all(0 < a < b < COOKIE_END for (a, _), (b, _) in itertools.pairwise(everything))
    for at, (cookie, _) in enumerate(everything):
        assert list(listing.after(cookie)) == everything[at + 1 :]
        assert [name for _, names in listing.chunks(cookie) for name in names] == [n for _, n in everything[at + 1 :]]
    again = DirectoryCookies.of(listing.pairs(), listing.following)
    assert list(again.after(0)) == everything
