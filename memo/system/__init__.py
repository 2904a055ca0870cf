"""The machine that a run stands on: files, processes, devices and their speeds, messages between ranks."""
