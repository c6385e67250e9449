"""Helpers shared by several test folders.

group           Group, HeldGroup, wait_until: real groups of processes; their files, messages and transactions
fork_server     start `mqproc` and test programs by forking a process that has loaded them
command_line    call() and PseudoTerminal: run `mqproc …` in this process, or on a terminal
processes       worker pools of test processes; mappings and open files of this process
client_preload  the module that forked client processes preload
records         a small log with records of many kinds, and damaged copies of it
fakes           StoreIOs with failing calls, a control file without a group, ManualClock, CountedName
store_builders  Engine, LiveStore, NumberedStore, StoppedStore, RecoveredStore, AgedStore: small stores without roles
store_checks    recover, verify, repair and compare stores; RecordingIO kills recovery at any call
"""
