"""What tests of nanofw and of other people's plugins are made from."""
