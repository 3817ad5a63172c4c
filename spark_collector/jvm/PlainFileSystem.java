package brokerless.spark;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.attribute.PosixFilePermissions;
import org.apache.hadoop.fs.LocalFileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

/**
 * Hadoop's own local file system, but for one thing: without its native library it starts the program {@code chmod} for
 * every file and folder that it makes, which for the checkpoint of a small batch takes longer than the batch.
 */
public final class PlainFileSystem extends LocalFileSystem {
  public PlainFileSystem() {
    super(new Raw());
  }

  private static final class Raw extends RawLocalFileSystem {
    @Override
    public void setPermission(Path path, FsPermission permission) throws IOException {
      if (permission.getStickyBit()) {
        super.setPermission(path, permission); // Java does not know that bit
        return;
      }
      String rights = permission.getUserAction().SYMBOL + permission.getGroupAction().SYMBOL
          + permission.getOtherAction().SYMBOL;
      Files.setPosixFilePermissions(pathToFile(path).toPath(), PosixFilePermissions.fromString(rights));
    }
  }
}
