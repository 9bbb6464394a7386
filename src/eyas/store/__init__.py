"""The hidden-state store: HDF5 shards and a manifest, addressed by content. `docs/store-format.md` is its format."""
