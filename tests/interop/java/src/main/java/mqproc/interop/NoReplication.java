package mqproc.interop;

import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.ha.DefaultHAService;

/**
 * Replication that opens no port: many stores are open at once here, and nobody is to reach them.
 *
 * <p>RocketMQ finds this class through META-INF/service.
 */
public final class NoReplication extends DefaultHAService {
    @Override
    public void init(DefaultMessageStore store) {
        this.defaultMessageStore = store;
    }

    @Override
    public void start() {
    }

    @Override
    public void shutdown() {
    }
}
