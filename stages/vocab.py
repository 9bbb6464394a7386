"""Stage `vocab`: the draft vocabulary, from the supervised tokens of the training split."""

from __future__ import annotations

from eyas.files import atomic_directory
from eyas.stage import Stage, stage_main
from eyas.tables import PROBE, TOKENS, read_table
from eyas.targets.resolve import open_target
from eyas.templates.chat import ChatTemplate
from eyas.vocabulary import choose, count_tokens, save_vocabulary


def run(stage: Stage) -> None:
    """Read the token rows, write `d2t`, `t2d` and the counts."""
    directory, target = open_target(stage.params.target, stage.data / "target.json")
    template = ChatTemplate(directory, trust_remote_code=stage.params.target.trust_remote_code)
    rows = [r for r in read_table(stage.data / "tokens" / "tokens.parquet", TOKENS) if r["kind"] != PROBE]
    by_split = {
        split: count_tokens(
            ((r["input_ids"], r["loss_mask"]) for r in rows if r["split"] == split), target["vocab_size"]
        )
        for split in ("train", "validation")
    }
    vocabulary = choose(by_split["train"], stage.params.vocab.draft_vocab_size, template.special_ids)
    with atomic_directory(stage.data / "vocab") as folder:
        save_vocabulary(folder / "vocab.safetensors", vocabulary)
    stage.provenance["tokens"] = int(by_split["train"].sum())
    stage.write_metrics(
        {
            "draft_vocab_size": len(vocabulary.d2t_D),
            "target_vocab_size": target["vocab_size"],
            "distinct_tokens": int((by_split["train"] > 0).sum()),
            "coverage": vocabulary.coverage(by_split["train"]),
            "validation_coverage": vocabulary.coverage(by_split["validation"]),
        }
    )


if __name__ == "__main__":
    stage_main("vocab", run)
