package brokerless.spark;

/** Something is not as a journal should be. Whoever reads asks Python, which knows what to do about it. */
final class Unusual extends Exception {
  Unusual(String what) {
    super(what, null, false, false);
  }
}
