"""The keys that say of a rank's part of a state what it is (API 1.7, 1.11)."""

#: True for a part of the state, False for all of it.
PARTIAL = "_smp_is_partial"
#: In a part of a sharded state: which shards it has, of how many (sharding/records.py).
SHARD = "_smp_shard"
