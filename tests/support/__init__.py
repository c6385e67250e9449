"""Helpers shared by several test folders.

store_builders  Engine, LiveStore, NumberedStore, StoppedStore: small stores without roles
aged_store      AgedStore: one record of known age per segment, for retention
faulty_io       FaultyIO, NoRoomForQueues, BadSectors: StoreIOs with failing calls
"""
