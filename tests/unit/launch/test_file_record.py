"""What ranks do with a script's files at once is done once, and each rank has its own to read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from collective.job.file_record import FileRecord
from collective.job.nameless_memory import nameless_file


@pytest.fixture
def ranks():
    """Makes the records of a job's ranks."""
    descriptors = []

    def make(count: int = 2, **options) -> list[FileRecord]:
        descriptors.append(nameless_file("record"))
        path = f"/proc/{os.getpid()}/fd/{descriptors[-1]}"
        return [FileRecord(path, rank, **options) for rank in range(count)]

    yield make
    for descriptor in descriptors:
        os.close(descriptor)


def write(record: FileRecord, path: Path, text: str, mode: str = "w") -> None:
    with record.writing(str(path), mode) as (file, mode), open(file, mode) as opened:
        opened.write(text)


def read(record: FileRecord, path: Path) -> str:
    return Path(record.reading(str(path))).read_text()


def makes(record: FileRecord, path: Path) -> None:
    record.make(str(path), lambda: os.mkdir(path))


def removes(record: FileRecord, path: Path) -> bool:
    return record.remove(str(path), lambda: shutil.rmtree(path))


def moves(record: FileRecord, source: Path, target: Path) -> str | None:
    def move(source: str, target: str) -> str:
        os.rename(source, target)
        return target

    return record.move(str(source), str(target), move)


def test_a_folder_that_another_rank_has_just_made_is_no_error(ranks, tmp_path):
    for order in (1, -1):
        folder = tmp_path / str(order)
        first, second = ranks()[::order]
        makes(first, folder)
        makes(second, folder)
        for record in (first, second):
            with pytest.raises(FileExistsError):
                makes(record, folder)


def test_a_folder_that_was_there_before_stays_an_error(ranks, tmp_path):
    for record in ranks():
        with pytest.raises(FileExistsError):
            makes(record, tmp_path)
        with pytest.raises(FileNotFoundError):
            removes(record, tmp_path / "never")


def test_a_folder_is_made_afresh_once(ranks, tmp_path):
    """The second rank to come would remove what the first has written meanwhile."""
    first, second = ranks()
    folder = tmp_path / "model"
    folder.mkdir()
    assert removes(first, folder)
    makes(first, folder)
    (folder / "checkpoint").touch()
    assert removes(second, folder)
    makes(second, folder)
    assert (folder / "checkpoint").exists()
    assert removes(second, folder) and removes(first, folder) and not folder.exists()


def test_a_folder_that_was_not_there_is_not_removed_once_another_rank_has_made_it(ranks, tmp_path):
    first, second = ranks()
    folder = tmp_path / "model"
    makes(first, folder)
    assert not removes(second, folder) and folder.exists()
    makes(second, folder)
    assert removes(second, folder) and not folder.exists()


def test_what_a_late_rank_makes_again_is_in_its_own_listings_alone(ranks, tmp_path):
    first, late, other = ranks(3)
    folder, target = tmp_path / "a", tmp_path / "b"
    makes(first, folder)
    moves(first, folder, target)
    makes(late, folder)
    assert folder.exists() and first.hidden() == {str(folder)} and not late.hidden()
    makes(other, folder)
    moves(other, folder, target)
    makes(late, folder / "c")
    moves(late, folder, target)
    assert not folder.exists()
    makes(first, folder)
    assert folder.exists() and not first.hidden() and not late.hidden()


@pytest.mark.parametrize("order", [1, -1])
def test_a_file_is_the_lowest_ranks(ranks, tmp_path, order):
    """Whichever rank comes first, each reads its own, also while another one opens the file."""
    records, path = ranks(3), tmp_path / "log"
    path.write_text("of an earlier job")
    opened = []
    for rank in range(3)[::order]:
        with records[rank].writing(str(path), "w") as (file, mode):
            opened.append(open(file, mode))  # noqa: SIM115
            opened[-1].write(f"{rank}\n")
    for file in opened:
        file.write("more\n")
        file.close()
    for rank, record in enumerate(records):
        assert read(record, path) == f"{rank}\nmore\n"
        write(record, path, "at last\n", "a")
    names = ("log", "log.rank1", "log.rank2")
    for rank, name in enumerate(names):
        assert (tmp_path / name).read_text() == f"{rank}\nmore\nat last\n"
    assert records[0].hidden() == {str(tmp_path / name) for name in names[1:]}


@pytest.mark.parametrize("order", [1, -1])
def test_a_rank_that_has_moved_its_file_does_not_list_a_late_ranks(ranks, tmp_path, order):
    records, path, target = ranks(), tmp_path / "new", tmp_path / "log"
    first, late = records[::order]
    write(first, path, "of the first")
    moves(first, path, target)
    write(late, path, "of the late one")
    assert str(path) in first.hidden() or not path.exists()
    assert str(path) not in late.hidden()
    moves(late, path, target)
    assert not path.exists()
    write(first, path, "again")
    assert str(path) not in first.hidden()
    assert read(first, target) == "of the first" and read(late, target) == "of the late one"


@pytest.mark.parametrize("order", [1, -1])
def test_appending_keeps_what_was_there(ranks, tmp_path, order):
    path = tmp_path / "record"
    path.write_text("before\n")
    for job in range(2):
        for record in ranks()[::order]:
            write(record, path, f"job {job}\n", "a")
    for name in ("record", "record.rank1"):
        assert (tmp_path / name).read_text() == "before\njob 0\njob 1\n"


def test_a_file_of_one_rank_has_its_name(ranks, tmp_path):
    _, second = ranks()
    write(second, tmp_path / "log", "of rank 1")
    assert (tmp_path / "log").read_text() == "of rank 1" and not second.hidden()


def test_a_file_that_cannot_be_written_is_nobodys(ranks, tmp_path):
    first, second = ranks()
    path = tmp_path / "missing" / "log"
    for record in (second, first):
        with pytest.raises(FileNotFoundError):
            write(record, path, "")
    path.parent.mkdir()
    write(second, path, "of rank 1")
    assert path.read_text() == "of rank 1"
    for record, text in ((second, "again"), (first, "of rank 0")):
        if record is second:
            with pytest.raises(FileExistsError):
                write(record, path.parent, text, "x")
    with pytest.raises(FileExistsError):
        write(second, path, "", "x")
    write(first, path, "of rank 0", "x")
    assert read(first, path) == "of rank 0" and read(second, path) == "of rank 1"


def test_files_are_moved_with_the_rank_that_wrote_them(ranks, tmp_path):
    """A file is written under another name first: in the end each rank has its own."""
    for order in (1, -1):
        draft, path = tmp_path / f"draft{order}", tmp_path / f"file{order}"
        for rank, record in [*enumerate(ranks())][::order]:
            write(record, draft, str(rank))
            moves(record, draft, path)
            assert read(record, path) == str(rank)
        assert path.read_text() == "0" and Path(f"{path}.rank1").read_text() == "1"
        assert not draft.exists()


def test_a_folder_is_moved_once(ranks, tmp_path):
    first, second = ranks()
    source, target = tmp_path / "new", tmp_path / "1"
    source.mkdir()
    assert moves(first, source, target) == str(target)
    assert moves(second, source, target) is None
    with pytest.raises(FileNotFoundError):
        moves(first, tmp_path / "never", target)


def test_a_rank_that_lags_behind_has_its_folder(ranks, tmp_path):
    """Another rank is done with it, and has removed or moved it, before this one makes it."""
    first, second = ranks()
    work, done = tmp_path / "work", tmp_path / "done"
    makes(first, work)
    assert removes(first, work)
    makes(second, work)
    write(second, work / "part", "1")
    makes(first, work)
    assert (work / "part").exists()  # as the first rank makes it, the second one uses it
    assert removes(second, work) and work.exists()
    assert moves(first, work, done) == str(done)
    makes(second, work)
    assert moves(second, work, done) is None and not work.exists()


def test_a_file_that_another_rank_has_written_is_not_removed(ranks, tmp_path):
    first, second = ranks()
    path = tmp_path / "log"
    write(first, path, "0")
    assert not removes(second, path)
    write(second, path, "1")
    assert removes(second, path) and not Path(f"{path}.rank1").exists()
    assert path.read_text() == "0"


def test_of_several_hosts_a_folder_of_this_jobs_time_is_no_error(ranks, tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    os.utime(folder)
    (record,) = ranks(1, is_of_several_hosts=True, has_rank_0=False)
    record._begin += 3600
    with pytest.raises(FileExistsError):
        makes(record, folder)
    record._begin -= 7200
    makes(record, folder)
    write(record, folder / "log", "")
    assert (folder / "log.rank0").exists()
