"""What the operating system and the interpreter are asked for: files, forks, memory, datagrams, C modules."""
