"""Mend a published store: rows that can still be read are kept, the others are extracted again by the stage itself.

A shard of a checkout, its scratch and DVC's cache are one file under three names, so damage in one place is damage in all. Repair
takes the damaged shards out of all three, after which `dvc repro --force` of the stage finds just those rows missing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from eyas.console import console
from eyas.errors import EyasError
from eyas.published import STAGE, cached_stores, store_path
from eyas.store.format import Manifest, ShardRecord, StoreSpec
from eyas.store.fsck import Damage, check_shard, verify_store
from eyas.store.shards import DamageError, ShardFile, link_shard
from eyas.store.spool import RowSpool


def repair(directory: Path, workers: int) -> list[Damage]:
    """Mend the store of a profile of this checkout; gives the damage that was found, an empty list where there was none.

    Args:
        directory: ``data/<profile>/hidden_states``.
        workers: processes that read.

    Raises:
        EyasError: not a profile's store, a damaged manifest, an extraction that fails, damage that remains.
    """
    profile = directory.resolve().parent.name
    if directory.resolve() != Path(store_path(profile)).resolve():
        raise EyasError(
            f"{directory}: not the store of a profile of this checkout ({store_path('<profile>')}); repair extracts rows again and needs its pipeline"
        )
    manifest = Manifest.read(directory)
    damages = verify_store(directory, None, workers)
    if not damages:
        return []
    broken = {damage.shard for damage in damages}
    spool = RowSpool(Path(".work") / profile / STAGE / manifest.spec.fingerprint[:16] / "rows", manifest.spec)
    left = [
        record
        for record in manifest.shards
        if record.name in broken and not _restore(directory / record.name, record, manifest.spec)
    ]
    spool.discard(sorted(broken))
    if left:
        for record in left:
            kept = _keep_readable(directory / record.name, record, manifest, spool)
            console.print(
                f"{record.name}: {record.rows - kept} of {record.rows} rows are extracted again", markup=False
            )
        command = [sys.executable, "-m", "dvc", "repro", "--force", "--single-item", f"{STAGE}@{profile}"]
        if subprocess.run(command, check=False).returncode:
            raise EyasError(
                f"extracting again failed; the readable rows are kept in {spool.directory}: mend what the message above names, then "
                f"`{' '.join(['dvc', *command[3:]])}`"
            )
    remaining = verify_store(directory, None, workers)
    if remaining:
        raise EyasError(f"{directory}: {len(remaining)} faults remain; `eyas store verify {directory}` lists them")
    return damages


def _restore(path: Path, record: ShardRecord, spec: StoreSpec) -> bool:
    """Put a shard back from the cache where that still has it whole; remove a damaged copy from the cache."""
    for cached in {store.files[record.name] for store in cached_stores() if record.name in store.files}:
        if not cached.is_file():
            continue
        if check_shard(cached, record, spec.fingerprint):
            cached.unlink()  # DVC would believe it by its name, and push it
            continue
        console.print(f"{record.name}: restored from DVC's cache", markup=False)
        path.unlink(missing_ok=True)
        link_shard(cached, path)
        return True
    return False


def _keep_readable(path: Path, record: ShardRecord, manifest: Manifest, spool: RowSpool) -> int:
    """Give the rows that can be read back to the scratch; gives their number."""
    if manifest.spec.lossy:
        return 0  # what is read is an approximation; encoded again it would not be the same one
    kept = 0
    try:
        with ShardFile(path, record) as shard:
            for row in range(record.rows):
                try:
                    spool.write(*shard.read(row))
                except DamageError:
                    continue
                kept += 1
    except DamageError:
        return kept
    return kept
