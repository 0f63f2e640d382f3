"""`twoscale explore`: a live page to watch a looped model think (the extra `explore`)."""
