"""The index against the log: which shares to ask about, and what the answers mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mqproc.layout import index_file as layout
from mqproc.store.verify.findings import Finding, Kind
from mqproc.store.verify.index_details import IndexAnswered, IndexQuestion, MissingEntries
from mqproc.store.verify.index_pass import IndexChecked
from mqproc.store.verify.log_findings import WholeLog
from mqproc.store.verify.log_pass import LogShare
from mqproc.store.verify.picture import Picture
from mqproc.store.verify.queue_findings import Ask


class IndexFindings:
    """Findings about the index of one picture."""

    def __init__(
        self,
        picture: Picture,
        log: WholeLog,
        shares: Sequence[LogShare],
        *,
        may_be_behind: bool,
        restart_from: int | None,
    ) -> None:
        """As those of QueueFindings."""
        self._picture = picture
        self._log = log
        self._shares = shares
        self._may_be_behind = may_be_behind
        self._restart_from = restart_from

    def run(self, checked: Iterable[IndexChecked], ask: Ask) -> list[Finding]:
        """All findings about the index."""
        if not self._picture.index:
            return list(self._of_none())
        findings = [*self._of_expired(), *self._of_names()]
        asked = False
        for file in checked:
            findings += file.findings
            asked |= not file.ascends
        spans = [
            (begin, found.end)
            for found in self._shares
            if found.share.compared and not found.index_fits and (begin := found.begin) is not None
        ]
        if asked or spans or self._leads_beyond():
            end = 1 << 62 if self._picture.positions.running else self._log.end
            question = IndexQuestion(spans, self._log.fault_ranges, self._log.begin, end, self._restart_from)
            for _question, answer in ask([question]):
                findings += self._of_answer(answer)
        return findings

    def _of_none(self) -> Iterable[Finding]:
        if self._log.entries:
            yield Finding(
                Kind.NOT_INDEXED if self._restart_from == self._log.begin else Kind.INDEX_MISSING,
                "index",
                physical_offset=self._log.begin,
                count=self._log.entries,
                text="no index file",
            )

    def _of_expired(self) -> Iterable[Finding]:
        for file in self._picture.index:
            end = file.header.end_physical_offset
            if file.header.count > layout.FIRST_ITEM and end < self._log.begin:
                count = file.header.count - layout.FIRST_ITEM
                yield Finding(Kind.ENTRY_EXPIRED, f"index/{file.name}", layout.HEADER_SIZE, end, count=count)

    def _of_names(self) -> Iterable[Finding]:
        """Files that lie behind one of later records: a search by key and time ends before it comes to all of them."""
        reached = 0
        # The header of the newest file of a running group may be half of this moment and half of the one before.
        for file in self._picture.index[:-1] if self._picture.positions.running else self._picture.index:
            header = file.header
            if header.count == layout.FIRST_ITEM:
                continue
            if header.begin_physical_offset < reached:
                place = layout.item_offset(self._picture.inventory.sizes.slots, layout.FIRST_ITEM)
                text = f"item 1: a file before it ends with the record at {reached:,}"
                offset = header.begin_physical_offset
                yield Finding(Kind.INDEX_ORDER, f"index/{file.name}", place, offset, text=text)
            reached = max(reached, header.end_physical_offset)

    def _leads_beyond(self) -> bool:
        """Whether a file says that it knows of records behind the log's end, or of none that can be."""
        running = self._picture.positions.running
        return not running and any(
            file.header.count > layout.FIRST_ITEM and file.header.end_physical_offset >= self._log.end
            for file in self._picture.index
        )

    def _of_answer(self, answer: IndexAnswered) -> Iterable[Finding]:
        yield from answer.findings
        for missing in answer.missing:
            kind = Kind.NOT_INDEXED if self._is_pending(missing, answer.last_indexed) else Kind.ENTRY_MISSING
            text = f"of records up to {missing.last_physical_offset:,}"
            yield Finding(
                kind, self._file_of(missing), physical_offset=missing.physical_offset, count=missing.count, text=text
            )

    def _is_pending(self, missing: MissingEntries, last_indexed: int) -> bool:
        """Whether a store may lack these entries, since it was not closed in order."""
        if self._restart_from is not None:
            return missing.physical_offset >= self._restart_from
        return self._may_be_behind and 0 <= last_indexed < missing.physical_offset

    def _file_of(self, missing: MissingEntries) -> str:
        """The file whose range holds a record; the newest one for those behind all."""
        for file in self._picture.index:
            if missing.physical_offset <= file.header.end_physical_offset:
                return f"index/{file.name}"
        return f"index/{self._picture.index[-1].name}"
