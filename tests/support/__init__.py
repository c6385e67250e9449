"""Helpers shared by several test folders.

group           Group, HeldGroup, wait_until: real groups of processes; a recovery that waits at named points
group_checks    compare a group's files with a rebuild from its log; list its messages and open transactions
fork_server     start `mqproc` and test programs by forking a process that has loaded them
command_line    call(): run `mqproc …` in this process; pseudo_terminal: run it on a terminal
processes       worker pools of test processes; mappings and open files of this process
client_preload  the module that forked client processes preload
records         a small log with records of many kinds, and damaged copies of it
fakes           a control file without a group, ManualClock, CountedName
store_builders  Engine, LiveStore, NumberedStore, StoppedStore, RecoveredStore: small stores without roles
store_checks    recover, verify and compare stores; RecordingIO kills recovery at any call
store_repair    verify and repair a store, check the report, and undo the repair
aged_store      AgedStore: one record of known age per segment, for retention
faulty_io       FaultyIO, NoRoomForQueues, BadSectors: StoreIOs with failing calls
"""
