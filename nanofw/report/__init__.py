"""Reports of `nanofw bench` as pictures and pages: from the JSON record alone, so an old one can be drawn again."""
