package mqproc.interop;

import com.alibaba.fastjson2.JSONObject;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Properties;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/** One store, opened as a broker does it: load(), then start(), which takes the lock. */
final class OpenStore {
    private static final long CLEANING_INTERVAL_MS = 3_600_000;
    private static final long DISPATCH_TIMEOUT_MS = 20_000;

    final MessageStoreConfig config = new MessageStoreConfig();
    final DefaultMessageStore store;
    /** Null until it is opened. */
    StoreTimer timer;
    private final Path root;

    OpenStore(Path root, JSONObject options) throws IOException {
        this.root = root;
        config.setStorePathRootDir(root.toString());
        config.setStorePathCommitLog(root.resolve("commitlog").toString());
        // Retention looks at the disk of the machine; what it would delete is no subject here.
        config.setCleanResourceInterval((int) CLEANING_INTERVAL_MS);
        config.setEnableCompaction(false);
        Properties properties = new Properties();
        options.forEach((name, value) -> properties.setProperty(name, value.toString()));
        MixAll.properties2Object(properties, config);
        store = new DefaultMessageStore(config, new BrokerStatsManager("interop", false), null, new BrokerConfig(),
            new ConcurrentHashMap<>());
    }

    /** What became of it: a store that RocketMQ does not load or start is not open afterwards. */
    JSONObject open() {
        JSONObject state = new JSONObject();
        state.put("loaded", store.load());
        state.put("started", false);
        if (!state.getBooleanValue("loaded")) {
            return state;
        }
        try {
            store.start();
            state.put("started", true);
            state.put("minPhyOffset", store.getMinPhyOffset());
            state.put("maxPhyOffset", store.getMaxPhyOffset());
        } catch (Exception error) {
            state.put("error", error.toString());
        }
        return state;
    }

    /** Returns when all that was appended is in queues and index. */
    void waitForDispatch() throws InterruptedException {
        long deadline = System.currentTimeMillis() + DISPATCH_TIMEOUT_MS;
        while (store.dispatchBehindBytes() > 0) {
            if (System.currentTimeMillis() > deadline) {
                throw new IllegalStateException(root + ": dispatch is " + store.dispatchBehindBytes() + " bytes behind");
            }
            Thread.sleep(1);
        }
    }

    JSONObject openTimer() throws IOException {
        timer = new StoreTimer(this, root);
        return timer.load();
    }

    JSONObject close() {
        if (timer != null) {
            timer.close();
        }
        store.shutdown();
        JSONObject state = new JSONObject();
        state.put("clean", !Files.exists(root.resolve("abort")));
        return state;
    }
}
